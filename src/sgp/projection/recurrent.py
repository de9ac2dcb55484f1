"""Recurrent layers: an input weight multiplies x_t, a recurrent weight the hidden state before the step, h_(t-1).

A call of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` does not show the hidden states of its lower layers. Each layer is
therefore run by itself, and its outputs are shifted by one step to become the states before each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sgp.projection.layer_types import Block, LayerType, register_layer

# The hidden states of all layers and directions; for an LSTM with the cell states.
State = Tensor | tuple[Tensor, Tensor]


@register_layer(nn.LSTM, nn.GRU, nn.RNN)
class RecurrentType(LayerType):
    """``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` with any number of layers, in one direction or both.

    The two directions of a layer read the same tensor, so their input weights share one subspace. Of a packed sequence
    only the positions that it holds count.
    """

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        assert isinstance(module, nn.RNNBase)
        if module.proj_size > 0:
            raise TypeError(
                f"a recurrent layer with proj_size={module.proj_size} cannot be protected, since the inputs of its "
                "projection weights are not known: build it with proj_size=0, or exclude it"
            )
        suffixes = [f"_l{layer}{end}" for layer in range(module.num_layers) for end in _list_directions(module)]
        return [block for suffix in suffixes for block in _make_blocks(suffix)]

    def find_inputs(
        self, module: nn.Module, input: Tensor | PackedSequence, hx: State | None = None
    ) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.RNNBase)
        directions = _list_directions(module)
        x, lengths = _pad(module, input)
        inputs: dict[str, Tensor] = {}
        for layer in range(module.num_layers):
            state = _select_rows(hx, slice(layer * len(directions), (layer + 1) * len(directions)))
            input = _run_layer(module, layer, input, state)
            outputs, _ = _pad(module, input)
            hidden = outputs.chunk(len(directions), dim=-1)
            for index, end in enumerate(directions):
                initial = None if state is None else _get_hidden(state)[index]
                inputs[f"input_l{layer}{end}"] = x
                inputs[f"hidden_l{layer}{end}"] = _shift(hidden[index], initial, lengths, is_reversed=bool(end))
            x = outputs
        return inputs

    def find_mask(self, module: nn.Module, input: Tensor | PackedSequence, hx: State | None = None) -> Tensor | None:
        assert isinstance(module, nn.RNNBase)
        if not isinstance(input, PackedSequence):
            return None
        x, lengths = _pad(module, input)
        return torch.arange(x.shape[1], device=lengths.device) < lengths.unsqueeze(1)


@register_layer(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
class RecurrentCellType(LayerType):
    """``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell``, of which each call is one step."""

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        return _make_blocks("")

    def find_inputs(self, module: nn.Module, input: Tensor, hx: State | None = None) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.RNNCellBase)
        samples = 1 if input.dim() == 1 else len(input)
        hidden = input.new_zeros(samples, module.hidden_size) if hx is None else _get_hidden(hx)
        return {
            "input": input.unsqueeze(0) if input.dim() == 1 else input,
            "hidden": hidden.unsqueeze(0) if hidden.dim() == 1 else hidden,
        }


def _make_blocks(suffix: str) -> list[Block]:
    """Return the two blocks of one layer in one direction."""
    return [
        Block(f"weight_ih{suffix}", f"bias_ih{suffix}", input=f"input{suffix}"),
        Block(f"weight_hh{suffix}", f"bias_hh{suffix}", input=f"hidden{suffix}"),
    ]


def _list_directions(module: nn.RNNBase) -> list[str]:
    """Return the suffix of the names of a layer's parameters in each direction."""
    return ["", "_reverse"] if module.bidirectional else [""]


def _pad(module: nn.RNNBase, sequence: Tensor | PackedSequence) -> tuple[Tensor, Tensor]:
    """Return a sequence as [samples, positions, features], and the number of positions of each sample."""
    if isinstance(sequence, PackedSequence):
        return pad_packed_sequence(sequence, batch_first=True)
    if sequence.dim() == 2:  # one sequence without a batch dimension
        sequence = sequence.unsqueeze(0)
    elif not module.batch_first:
        sequence = sequence.transpose(0, 1)
    return sequence, torch.full((len(sequence),), sequence.shape[1], device="cpu")


def _select_rows(state: State | None, rows: slice) -> State | None:
    """Return the part of an initial state that belongs to some layers and directions."""
    if state is None or isinstance(state, Tensor):
        return None if state is None else state[rows]
    return state[0][rows], state[1][rows]


def _get_hidden(state: State) -> Tensor:
    """Return the hidden states, without the cell states of an LSTM."""
    return state if isinstance(state, Tensor) else state[0]


def _shift(hidden: Tensor, initial: Tensor | None, lengths: Tensor, *, is_reversed: bool) -> Tensor:
    """Return the hidden state before each step.

    Args:
        hidden: Hidden states after each step. [samples, positions, features]
        initial: Hidden states before the first step; None for zeros. [samples, features]
        lengths: Number of positions of each sample. [samples]
        is_reversed: Whether the steps begin at the last position.

    Returns:
        Hidden states before each step. [samples, positions, features]
    """
    before = hidden.roll(-1 if is_reversed else 1, dims=1)
    first = lengths - 1 if is_reversed else torch.zeros_like(lengths)
    samples = torch.arange(len(lengths), device=lengths.device)
    before[samples, first] = before.new_zeros(()) if initial is None else initial.to(before.dtype)
    return before


def _run_layer(
    module: nn.RNNBase, layer: int, input: Tensor | PackedSequence, state: State | None
) -> Tensor | PackedSequence:
    """Return the outputs of one layer in all its directions, in the layout of its input.

    The weights are detached: on CUDA a recurrent module moves its weights into one buffer when it is called, and the
    weights of ``module`` must stay where they are.
    """
    directions = _list_directions(module)
    size = module.input_size if layer == 0 else module.hidden_size * len(directions)
    settings: dict[str, Any] = {name: getattr(module, name) for name in ("bias", "batch_first", "bidirectional")}
    if isinstance(module, nn.RNN):
        settings["nonlinearity"] = module.nonlinearity
    kind = next(kind for kind in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(module, kind))
    single = kind(size, module.hidden_size, device="meta", **settings)
    names = [name for name, _ in single.named_parameters()]
    weights = {name: getattr(module, name.replace("_l0", f"_l{layer}")).detach() for name in names}
    outputs: Tensor | PackedSequence = functional_call(single.eval(), weights, (input, state))[0]
    return outputs
