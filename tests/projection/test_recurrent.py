"""Recurrent layers: input weights see x_t, recurrent weights the state before each step, in every form of input."""

import copy
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from projection.process_pair import run_processes
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer

import sgp
from sgp.projection import layer_types
from sgp.projection.collect import collect_inputs
from sgp.projection.gram import InputGram
from sgp.projection.layer_types import Block, LayerType, get_layer_type, register_layer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.sharded import gather_whole

RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN with tanh": nn.RNN,
    "RNN with ReLU": lambda *args, **options: nn.RNN(*args, nonlinearity="relu", **options),
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
    "RNNCell with tanh": nn.RNNCell,
    "RNNCell with ReLU": lambda *args, **options: nn.RNNCell(*args, nonlinearity="relu", **options),
}
FORMS = ("positions first", "batch first", "unbatched", "packed, sorted", "packed, unsorted")
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, lr=0.02),
}
nearly_full = pytest.mark.filterwarnings("ignore:.*can hardly learn")


@pytest.fixture(autouse=True)
def same_weights_every_time() -> None:
    torch.manual_seed(0)


# The recurrence as the documentation of PyTorch writes it, one sample and one step at a time.

Rows = dict[str, Tensor]


def take_step(module: nn.Module, suffix: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states after one step of one layer in one direction; only an LSTM has a cell state."""
    input_part = getattr(module, f"weight_ih{suffix}") @ x
    hidden_part = getattr(module, f"weight_hh{suffix}") @ h
    if module.bias:
        input_part = input_part + getattr(module, f"bias_ih{suffix}")
        hidden_part = hidden_part + getattr(module, f"bias_hh{suffix}")
    return combine_gates(module, input_part, hidden_part, h, c)


def combine_gates(
    module: nn.Module, input_part: Tensor, hidden_part: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new state from the products of the two weights with their inputs."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        i, f, g, o = (input_part + hidden_part).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if isinstance(module, nn.GRU | nn.GRUCell):
        (input_r, input_z, input_n), (hidden_r, hidden_z, hidden_n) = input_part.chunk(3), hidden_part.chunk(3)
        r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
        return (1 - z) * (input_n + r * hidden_n).tanh() + z * h, c
    new = input_part + hidden_part
    return (new.relu() if module.nonlinearity == "relu" else new.tanh()), c


def run_by_steps(
    module: nn.RNNBase, samples: Sequence[Tensor], h: Tensor, c: Tensor
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return the outputs of a module and the inputs of each block, by sample in the order of positions."""
    directions = ["", "_reverse"] if module.bidirectional else [""]
    outputs = list(samples)
    rows: dict[str, list[Tensor]] = {}
    for layer in range(module.num_layers):
        parts: dict[str, list[Tensor]] = {}
        for number, end in enumerate(directions):
            suffix = f"_l{layer}{end}"
            rows[f"input{suffix}"] = outputs
            for sample, x in enumerate(outputs):
                hidden, cell = (state[layer * len(directions) + number, sample] for state in (h, c))
                before, after = (
                    torch.empty(len(x), module.hidden_size).to(x),
                    torch.empty(len(x), module.hidden_size).to(x),
                )
                for position in reversed(range(len(x))) if end else range(len(x)):
                    before[position] = hidden
                    hidden, cell = take_step(module, suffix, x[position], hidden, cell)
                    after[position] = hidden
                rows.setdefault(f"hidden{suffix}", []).append(before)
                parts.setdefault(end, []).append(after)
        outputs = [torch.cat(ends, dim=1) for ends in zip(*parts.values(), strict=True)]
    return outputs, rows


class Case:
    """A recurrent module, its samples, and the arguments that pass these in some form."""

    def __init__(self, module: nn.RNNBase, lengths: Sequence[int], form: str, *, has_state: bool) -> None:
        self.module, self.form = module, form
        self.samples = [torch.randn(length, module.input_size).to(module.weight_ih_l0) for length in lengths]
        shape = (module.num_layers * (1 + module.bidirectional), len(lengths), module.hidden_size)
        states = [torch.randn(shape).to(module.weight_ih_l0) for _ in range(2)]
        self.h, self.c = states if has_state else [torch.zeros_like(state) for state in states]
        self.arguments: tuple[Any, ...] = (self.arrange(self.samples),)
        if has_state:
            h, c = (state.squeeze(1) if form == "unbatched" else state for state in states)
            self.arguments += ((h, c) if isinstance(module, nn.LSTM) else h,)

    def arrange(self, samples: Sequence[Tensor]) -> Tensor | PackedSequence:
        if self.form.startswith("packed"):
            return pack_sequence(list(samples), enforce_sorted=self.form == "packed, sorted")
        if self.form == "unbatched":
            return samples[0]
        return torch.stack(list(samples), dim=0 if self.form == "batch first" else 1)

    def separate(self, output: Tensor | PackedSequence) -> list[Tensor]:
        """Return the output of each sample."""
        if isinstance(output, PackedSequence):
            return nn.utils.rnn.unpack_sequence(output)
        if self.form == "unbatched":
            return [output]
        return list(output.unbind(0 if self.form == "batch first" else 1))


@st.composite
def recurrent_cases(draw: st.DrawFn) -> Case:
    form = draw(st.sampled_from(FORMS))
    torch.manual_seed(draw(st.integers(0, 99)))
    module = RECURRENT[draw(st.sampled_from(list(RECURRENT)))](
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        bias=draw(st.booleans()),
        batch_first=form == "batch first" or (form != "positions first" and draw(st.booleans())),
        bidirectional=draw(st.booleans()),
    ).double()
    n = 1 if form == "unbatched" else draw(st.integers(1, 3))
    lengths = (
        [draw(st.integers(1, 4)) for _ in range(n)] if form.startswith("packed") else [draw(st.integers(1, 4))] * n
    )
    lengths = sorted(lengths, reverse=True) if form == "packed, sorted" else lengths
    return Case(module, lengths, form, has_state=draw(st.booleans()))


def find_rows(module: nn.Module, *args: Any, **kwargs: Any) -> Rows:
    """Return the inputs of each block for all samples."""
    layer_type = get_layer_type(module)
    assert layer_type is not None
    inputs, mask = layer_type.find_inputs(module, *args, **kwargs), layer_type.find_mask(module, *args, **kwargs)
    masked = {name: x if mask is None else layer_type.apply_mask(x, mask) for name, x in inputs.items()}
    return {name: layer_type.unfold_rows(module, x)[0] for name, x in masked.items()}


many = settings(max_examples=200, deadline=None, derandomize=True)


@many
@given(recurrent_cases())
def test_rows_are_the_inputs_of_a_loop_over_layers_directions_samples_and_steps(case: Case) -> None:
    with torch.no_grad():
        outputs, expected = run_by_steps(case.module, case.samples, case.h, case.c)
        found = find_rows(case.module, *case.arguments)
        output = case.separate(case.module(*case.arguments)[0])
    for sample, by_steps in zip(output, outputs, strict=True):
        torch.testing.assert_close(sample, by_steps)
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        torch.testing.assert_close(rows, torch.cat(expected[name]), msg=lambda text, name=name: f"{name}: {text}")


@many
@given(recurrent_cases())
def test_rows_times_the_weights_are_the_gates_that_give_each_layers_outputs(case: Case) -> None:
    module = case.module
    layer_type = get_layer_type(module)
    assert layer_type is not None
    directions = ["", "_reverse"] if module.bidirectional else [""]
    with torch.no_grad():
        rows = find_rows(module, *case.arguments)
        products = {}
        for block in layer_type.find_blocks(module):
            product = rows[block.input] @ block.view_matrix(getattr(module, block.weight))[0].mT
            bias = getattr(module, block.bias, None)
            products[block.input] = product if bias is None else product + block.view_bias(bias)[0]
        lengths = [len(sample) for sample in case.samples]
        for layer in range(module.num_layers):
            found = []
            for number, end in enumerate(directions):
                parts = [products[f"{name}_l{layer}{end}"].split(lengths) for name in ("input", "hidden")]
                states = rows[f"hidden_l{layer}{end}"].split(lengths)
                each = []
                for sample, (input_part, hidden_part, before) in enumerate(zip(*parts, states, strict=True)):
                    cell = case.c[layer * len(directions) + number, sample]
                    after = torch.empty_like(before)
                    for t in reversed(range(len(before))) if end else range(len(before)):
                        after[t], cell = combine_gates(module, input_part[t], hidden_part[t], before[t], cell)
                    each.append(after)
                found.append(torch.cat(each))
            is_last = layer == module.num_layers - 1
            expected = torch.cat(case.separate(module(*case.arguments)[0])) if is_last else rows[f"input_l{layer + 1}"]
            torch.testing.assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS.keys())
def test_rows_times_the_weights_of_a_cell_are_its_gates(
    cell: Callable[..., nn.RNNCellBase], has_state: bool, is_batched: bool, bias: bool
) -> None:
    module = cell(3, 4, bias=bias).double()
    x, h, c = (torch.randn(2, size, dtype=torch.float64) for size in (3, 4, 4))
    if not has_state:
        h, c = torch.zeros_like(h), torch.zeros_like(c)
    x, h, c = (tensor if is_batched else tensor[0] for tensor in (x, h, c))
    state = (((h, c) if isinstance(module, nn.LSTMCell) else h),) if has_state else ()
    rows = find_rows(module, x, *state)
    assert rows.keys() == {"input", "hidden"}
    torch.testing.assert_close(rows["input"], x.reshape(-1, 3), rtol=0, atol=0)
    torch.testing.assert_close(rows["hidden"], h.reshape(-1, 4), rtol=0, atol=0)
    output = module(x, *state)
    output = (output if isinstance(output, Tensor) else output[0]).reshape(-1, 4)
    for sample, expected in enumerate(output):
        cell_state = c.reshape(-1, 4)[sample]
        after, _ = take_step(module, "", rows["input"][sample], rows["hidden"][sample], cell_state)
        torch.testing.assert_close(after, expected)


def test_arguments_may_be_passed_by_name_and_no_random_number_is_drawn() -> None:
    case = Case(nn.LSTM(3, 4, 2), [3, 3], "positions first", has_state=True)
    x, state = case.arguments
    generator = torch.get_rng_state()
    by_name = find_rows(case.module, input=x, hx=state)
    for name, rows in find_rows(case.module, x, state).items():
        assert torch.equal(rows, by_name[name])
    assert torch.equal(torch.get_rng_state(), generator)


# Inputs that an update collects.


def collect_grams(model: nn.Module, batches: Sequence[Any], **options: Any) -> dict[str, InputGram]:
    layers = list(scan_model(model, ScanRules(bias="freeze")).layers.values())
    names = [layer.name for layer in layers]
    samples = dict.fromkeys(names, options.pop("samples", None))
    return collect_inputs(model, batches, layers, samples=samples, **options)


def assert_are_rows_of(found: dict[str, InputGram], expected: dict[str, Tensor]) -> None:
    """Assert that Gram matrices and their numbers of rows are equal."""
    assert {name.split(":")[1] for name in found} == expected.keys()
    for name, gram in found.items():
        rows, wanted = gram.get_rows(), expected[name.split(":")[1]].double()
        assert gram.count == len(wanted), name
        matrix = gram.get_gram() if rows is None else rows.mT @ rows
        torch.testing.assert_close(matrix[0], wanted.mT @ wanted, msg=lambda text, name=name: f"{name}: {text}")


def get_expected(case: Case, *, samples: int | None = None, keep: Sequence[Tensor] | None = None) -> Rows:
    with torch.no_grad():
        _, rows = run_by_steps(case.module, case.samples, case.h, case.c)
    kept = {
        name: each if keep is None else [x[k] for x, k in zip(each, keep, strict=True)] for name, each in rows.items()
    }
    return {name: torch.cat(each[:samples]) for name, each in kept.items()}


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("form", ["positions first", "batch first", "packed, sorted", "packed, unsorted"])
@pytest.mark.parametrize("kind", RECURRENT.values(), ids=RECURRENT.keys())
def test_an_update_collects_the_inputs_of_every_layer_and_direction(
    kind: Callable[..., nn.RNNBase], form: str, samples: int | None
) -> None:
    module = kind(3, 4, 2, bidirectional=True, batch_first=form == "batch first").double()
    lengths = {"packed, sorted": [5, 3, 2], "packed, unsorted": [2, 5, 3]}.get(form, [4, 4, 4])
    case = Case(module, lengths, form, has_state=True)
    # The first tensor of a batch determines its number of samples.
    batch = (torch.zeros(3), case.arguments)
    found = collect_grams(module, [batch], forward=lambda batch: module(*batch[1]), samples=samples)
    assert_are_rows_of(found, get_expected(case, samples=samples))


def test_both_directions_of_a_layer_share_one_gram_matrix_of_their_input() -> None:
    case = Case(nn.LSTM(3, 4, 2, bidirectional=True), [2, 4], "packed, unsorted", has_state=False)
    found = collect_grams(case.module, [case.arguments[0]])
    for layer in range(2):
        assert found[f"(model):input_l{layer}"] is found[f"(model):input_l{layer}_reverse"]
        assert found[f"(model):hidden_l{layer}"] is not found[f"(model):hidden_l{layer}_reverse"]
    assert len({id(gram) for gram in found.values()}) == 6


def test_a_linear_layer_that_reads_what_a_recurrent_layer_reads_shares_its_subspace() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.linear = nn.GRU(3, 4, batch_first=True), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.recurrent(x)[0] + self.linear(x)
            return output

    found = collect_grams(Beside(), [torch.randn(2, 3, 3)])
    assert found["recurrent:input_l0"] is found["linear"]
    assert found["recurrent:hidden_l0"] is not found["linear"]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.zeros(3))], ids=["alone", "with labels"])
def test_a_batch_may_be_a_packed_sequence_whose_samples_are_counted(wrap: Callable[[Any], Any]) -> None:
    case = Case(nn.LSTM(3, 4).double(), [2, 5, 3], "packed, unsorted", has_state=False)
    batch = wrap(case.arguments[0])
    assert_are_rows_of(collect_grams(case.module, [batch]), get_expected(case))
    # The first samples are the ones that the user passed first, not the longest.
    assert_are_rows_of(collect_grams(case.module, [batch], samples=2), get_expected(case, samples=2))


def test_a_packed_sequence_in_place_of_batches_is_refused() -> None:
    memory = sgp.GradientMemory(nn.LSTM(3, 4), threshold=0.9)
    with pytest.raises(TypeError, match=r"looks like a single batch: pass \[batch\]"):
        memory.update(pack_sequence([torch.randn(2, 3)]))


@pytest.mark.parametrize("form", ["positions first", "batch first", "unbatched"])
def test_a_mask_leaves_out_steps_of_x_and_of_the_state_before_them(form: str) -> None:
    module = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=form == "batch first").double()
    case = Case(module, [5] if form == "unbatched" else [5, 5, 5], form, has_state=True)
    keep = torch.arange(5) < torch.tensor([2, 5, 4]).unsqueeze(1)
    keep = keep[: len(case.samples)]
    found = collect_grams(module, [keep], forward=lambda batch: module(*case.arguments), mask=lambda batch: batch)
    assert_are_rows_of(found, get_expected(case, keep=list(keep)))


def test_the_attention_mask_of_a_batch_counts_for_recurrent_layers() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            output: Tensor = self.recurrent(x)[0]
            return output

    model = Tagger().double()
    case = Case(model.recurrent, [4, 4], "batch first", has_state=False)
    keep = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    found = collect_grams(model, [{"x": case.arguments[0], "attention_mask": keep}])
    assert_are_rows_of(found, get_expected(case, keep=list(keep.bool())))


def test_a_mask_and_a_packed_sequence_are_combined() -> None:
    case = Case(nn.LSTM(3, 4).double(), [2, 5, 3], "packed, unsorted", has_state=False)
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[0, 1] = keep[1, 3] = False
    found = collect_grams(case.module, [case.arguments[0]], mask=lambda batch: keep)
    assert_are_rows_of(found, get_expected(case, keep=[k[: len(x)] for k, x in zip(keep, case.samples, strict=True)]))


@pytest.mark.parametrize("shape", [(3, 4), (5, 3)])
def test_a_mask_of_another_shape_does_not_apply_to_a_packed_sequence(shape: tuple[int, int]) -> None:
    case = Case(nn.LSTM(3, 4).double(), [2, 5, 3], "packed, unsorted", has_state=False)
    batch = (torch.zeros(shape[0]), case.arguments[0])
    keep = torch.zeros(shape, dtype=torch.bool)
    found = collect_grams(case.module, [batch], forward=lambda batch: case.module(batch[1]), mask=lambda batch: keep)
    assert_are_rows_of(found, get_expected(case))


def test_a_cell_collects_every_step_of_its_loop() -> None:
    model = Loop(nn.LSTMCell).double()
    x = torch.randn(2, 3, 10, dtype=torch.float64)
    found = collect_grams(model, [x])
    rows: dict[str, list[Tensor]] = {"input": [], "hidden": []}
    with torch.no_grad():
        for sample in x:
            h = c = torch.zeros(12, dtype=torch.float64)
            for step in sample:
                rows["input"].append(step)
                rows["hidden"].append(h)
                h, c = take_step(model.cell, "", step, h, c)
    assert_are_rows_of(found, {name: torch.stack(each) for name, each in rows.items()})


@pytest.mark.parametrize("form", ["batch first", "packed, unsorted"])
def test_inputs_under_autocast_are_those_in_full_precision_to_its_rounding(form: str) -> None:
    case = Case(nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), [3, 3], form, has_state=True)

    def forward(batch: object) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.module(*case.arguments)

    found, expected = collect_grams(case.module, [torch.zeros(2)], forward=forward), get_expected(case)
    for name, gram in found.items():
        rows = gram.get_rows()
        wanted = expected[name.split(":")[1]].double()
        matrix = gram.get_gram() if rows is None else rows.mT @ rows
        torch.testing.assert_close(matrix[0], wanted.mT @ wanted, atol=0.05, rtol=0.05)


# Any layer type can return the mask of a call.


class Padded(nn.Module):
    """A linear layer that receives the length of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x @ self.weight.mT


@pytest.fixture
def padded_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    @register_layer(Padded)
    class PaddedType(LayerType):
        def find_blocks(self, module: nn.Module) -> Sequence[Block]:
            return [Block("weight")]

        def find_mask(self, module: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
            return torch.arange(x.shape[1]) < lengths.unsqueeze(1)


@pytest.mark.usefixtures("padded_type")
def test_a_layer_type_may_return_a_mask_of_each_call() -> None:
    model = nn.ModuleList([Padded(), Padded(), nn.Linear(3, 4)])
    x = torch.randn(3, 3, 3)  # as many samples as positions: the mask of the call distinguishes them
    first, second = torch.tensor([1, 3, 2]), torch.tensor([3, 3, 3])

    def forward(batch: Tensor) -> None:
        model[0](batch, first)
        model[1](batch, second)
        model[2](batch)

    def gram_of(name: str, samples: int | None = None) -> tuple[int, Tensor]:
        gram = collect_grams(model, [x], forward=forward, samples=samples)[name]
        rows = gram.get_rows()
        return gram.count, (gram.get_gram() if rows is None else rows.mT @ rows)[0]

    present = [x[0, :1], x[1], x[2, :2]]
    for name, samples, rows in (
        ("0", None, torch.cat(present)),
        ("0", 2, torch.cat(present[:2])),
        ("1", None, x.flatten(0, 1)),
        ("2", None, x.flatten(0, 1)),
    ):
        count, gram = gram_of(name, samples)
        assert count == len(rows)
        torch.testing.assert_close(gram, rows.double().mT @ rows.double())


# Protection.


class Loop(nn.Module):
    """A cell in a loop over positions of [samples, positions, features]."""

    def __init__(self, cell: Callable[..., nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = cell(10, 12, **options)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs, dim=1)


def get_outputs(value: Any) -> Tensor:
    """Return the outputs of a recurrent module as one vector, including the last states."""
    if isinstance(value, Tensor):
        return value.flatten()
    parts = [value.data] if isinstance(value, PackedSequence) else value
    return torch.cat([get_outputs(part) for part in parts])


def assert_training_on_others_leaves_outputs(
    model: nn.Module,
    old: tuple[Any, ...],
    new: tuple[Any, ...],
    optimizer_of: Callable[..., Optimizer],
    *,
    blocked: Sequence[str] = (),
    every: int = 1,
) -> sgp.GradientMemory:
    """Assert that the outputs for a batch stay while others train, remembering it with importance 1.

    Args:
        model: Any recurrent module.
        old: Arguments of the module that are remembered.
        new: Arguments that it is trained on.
        optimizer_of: Function that builds the optimizer.
        blocked: Parts of the names of the parameters that cannot move at all.
        every: Number of steps that are projected at once.

    Returns:
        The memory.
    """
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = optimizer_of(model.parameters())
    memory.attach(optimizer, every=every)
    memory.update([old], forward=lambda batch: model(*batch))
    assert memory.subspaces.keys() == memory.layers.keys()
    for name, subspace in memory.subspaces.items():
        assert 0 < subspace.blocked < subspace.dimension, name
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        outputs, others = get_outputs(model(*old)), get_outputs(model(*new))
    target = others + 0.2 * torch.randn_like(others)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (get_outputs(model(*new)) - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], "the new task did not train"
    for name, parameter in model.named_parameters():
        change = float((parameter.detach() - weights[name]).abs().max())
        is_blocked = any(pattern in name for pattern in blocked)
        assert change < 1e-6 if is_blocked else change > 1e-3, f"{name} moved by {change:.1e}"
    with torch.no_grad():
        torch.testing.assert_close(get_outputs(model(*old)), outputs, rtol=0, atol=1e-5)
    return memory


def make_cases(kind: Callable[..., nn.RNNBase], form: str, *, has_state: bool, **options: Any) -> tuple[Case, Case]:
    """Return two batches for one module that is wide enough to have free directions after the first."""
    options = {"num_layers": 2, "bidirectional": True, "batch_first": form == "batch first"} | options
    module = kind(12, 16, **options)
    lengths = {"unbatched": [4], "packed, sorted": [4, 2, 1], "packed, unsorted": [1, 4, 2]}.get(form, [3, 3])
    return tuple(Case(module, lengths, form, has_state=has_state) for _ in range(2))  # type: ignore[return-value]


@nearly_full
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", RECURRENT.values(), ids=RECURRENT.keys())
def test_outputs_on_old_sequences_stay_while_two_layers_in_both_directions_train_on_others(
    kind: Callable[..., nn.RNNBase], form: str, optimizer_of: Callable[..., Optimizer]
) -> None:
    old, new = make_cases(kind, form, has_state=True)
    assert_training_on_others_leaves_outputs(old.module, old.arguments, new.arguments, optimizer_of)


@nearly_full
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("options", [{"bias": False}, {"bidirectional": False}, {"num_layers": 1}], ids=str)
@pytest.mark.parametrize("kind", RECURRENT.values(), ids=RECURRENT.keys())
def test_outputs_on_old_sequences_stay_without_an_initial_state_whatever_the_module_has(
    kind: Callable[..., nn.RNNBase], options: dict[str, Any], optimizer_of: Callable[..., Optimizer]
) -> None:
    old, new = make_cases(kind, "positions first", has_state=False, **options)
    # After a zero state, only the bias of the recurrent weight affects the first step.
    assert_training_on_others_leaves_outputs(
        old.module, old.arguments, new.arguments, optimizer_of, blocked=["bias_hh"]
    )


@nearly_full
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS.keys())
def test_outputs_on_old_sequences_stay_while_a_cell_trains_on_others(
    cell: Callable[..., nn.RNNCellBase], optimizer_of: Callable[..., Optimizer], bias: bool
) -> None:
    old, new = (torch.randn(2, 3, 10) for _ in range(2))
    assert_training_on_others_leaves_outputs(Loop(cell, bias=bias), (old,), (new,), optimizer_of, blocked=["bias_hh"])


@nearly_full
def test_several_steps_may_be_projected_at_once() -> None:
    old, new = make_cases(nn.LSTM, "packed, unsorted", has_state=True)
    memory = assert_training_on_others_leaves_outputs(
        old.module, old.arguments, new.arguments, OPTIMIZERS["Adam"], every=5
    )
    assert memory.check(old.arguments, forward=lambda batch: old.module(*batch)).leak < 1e-5


@nearly_full
def test_masked_outputs_stay_where_padding_comes_last() -> None:
    torch.manual_seed(1)
    model = nn.GRU(12, 16, 2, batch_first=True)
    old, new = torch.randn(2, 6, 12), torch.randn(2, 6, 12)
    keep = torch.arange(6) < torch.tensor([[2], [3]])
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([old], mask=lambda batch: keep)
    optimizer = Adam(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    before = model(old)[0].detach()
    for _ in range(20):
        optimizer.zero_grad()
        model(new)[0].square().sum().backward()
        optimizer.step()
    after = model(old)[0].detach()
    torch.testing.assert_close(after[keep], before[keep], rtol=0, atol=1e-5)
    assert float((after[~keep] - before[~keep]).abs().max()) > 0.01


def test_a_projected_lstm_is_refused_by_name_unless_it_is_excluded() -> None:
    model = nn.ModuleDict({"encoder": nn.LSTM(3, 4, proj_size=2), "head": nn.Linear(2, 2)})
    message = r"layer 'encoder': a recurrent layer with proj_size=2 .* build it with proj_size=0, or exclude it"
    with pytest.raises(TypeError, match=message):
        sgp.GradientMemory(model, threshold=0.9)
    with pytest.raises(TypeError, match=r"layer '\(model\)'"):
        sgp.GradientMemory(model["encoder"], threshold=0.9)
    memory = sgp.GradientMemory(model, threshold=0.9, exclude=["encoder"])
    assert list(memory.layers) == ["head"]


def test_a_subclass_without_a_forward_of_its_own_is_protected_as_its_parent_is() -> None:
    class Narrow(nn.RNN):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, nonlinearity="relu", num_layers=2)

    case = Case(Narrow(3).double(), [4, 4], "positions first", has_state=False)
    found = collect_grams(case.module, [torch.zeros(2)], forward=lambda batch: case.module(*case.arguments))
    assert_are_rows_of(found, get_expected(case))


def test_an_update_leaves_outputs_weights_flags_and_random_states_as_they_were() -> None:
    model = nn.LSTM(3, 4, 2, dropout=0.5, bidirectional=True).train()
    x, state = torch.randn(5, 2, 3), (torch.randn(4, 2, 4), torch.randn(4, 2, 4))
    flat = list(model._flat_weights)
    weights = {name: (parameter.detach().clone(), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    memory = sgp.GradientMemory(model, threshold=0.9)

    def run() -> Tensor:
        torch.manual_seed(3)
        return get_outputs(model(x, state)).detach()

    before = run()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    memory.update([x], forward=lambda batch: model(batch, state))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert model.training
    assert all(a is b for a, b in zip(model._flat_weights, flat, strict=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name][0])
        assert parameter.data_ptr() == weights[name][1]
    assert torch.equal(run(), before)
    assert not torch.equal(
        run(), get_outputs(model.eval()(x, state))
    )  # dropout is active in training and not in an update


# Summary, plan and check.


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(12, 16, 2, bidirectional=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        outputs = self.recurrent(x)[0]
        return self.head(outputs.data if isinstance(outputs, PackedSequence) else outputs)


def make_packed(seed: int, lengths: Sequence[int] = (2, 4, 1)) -> PackedSequence:
    generator = torch.Generator().manual_seed(seed)
    return pack_sequence([torch.randn(n, 12, generator=generator) for n in lengths], enforce_sorted=False)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 10) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(make_packed(100 + step)).square().mean().backward()
        optimizer.step()


SUFFIXES = ("_l0", "_l0_reverse", "_l1", "_l1_reverse")
BLOCKS = [f"recurrent:{name}{suffix}" for suffix in SUFFIXES for name in ("input", "hidden")]


@nearly_full
def test_capacity_and_summary_list_each_block_and_shared_bases() -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, strict=True)
    memory.update([make_packed(0)])
    capacity = memory.capacity()
    found = {layer.layer: (layer.bases, layer.dimension, layer.shares) for layer in capacity.layers}
    assert list(found) == [*BLOCKS, "head"]
    assert found["recurrent:input_l0"] == (7, 13, None)  # a row for each position, and the constant input of the bias
    assert found["recurrent:input_l0_reverse"] == (7, 13, "recurrent:input_l0")
    assert found["recurrent:input_l1_reverse"] == (7, 33, "recurrent:input_l1")
    # The state before the first step is zero in all three samples: five different rows, with the constant input.
    assert found["recurrent:hidden_l0"] == (5, 17, None)
    assert not capacity.frozen
    assert not capacity.free
    summary = str(memory.summary())
    assert all(name in summary for name in BLOCKS)
    assert "recurrent:input_l0, recurrent:input_l0_reverse" in summary


def test_plan_counts_the_positions_of_packed_sequences() -> None:
    memory = sgp.GradientMemory(Tagger(), threshold=0.9)
    plan = memory.plan(30, make_packed(0))
    found = {tuple(layer.layers): (layer.rows, layer.dimension) for layer in plan.layers}
    assert found == {
        ("recurrent:input_l0", "recurrent:input_l0_reverse"): (70, 13),
        ("recurrent:hidden_l0",): (70, 17),
        ("recurrent:hidden_l0_reverse",): (70, 17),
        ("recurrent:input_l1", "recurrent:input_l1_reverse"): (70, 33),
        ("recurrent:hidden_l1",): (70, 17),
        ("recurrent:hidden_l1_reverse",): (70, 17),
        ("head",): (70, 33),
    }
    assert plan.seconds > 0


@nearly_full
def test_check_finds_no_leak_in_projected_training_and_drift_only_on_new_sequences() -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_packed(0)])
    optimizer = Adam(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    train(model, optimizer)
    old, new = memory.check(make_packed(0)), memory.check(make_packed(1))
    assert [layer.layer for layer in old.layers] == [*BLOCKS, "head"]
    assert old.leak < 1e-5
    assert old.drift < 1e-5
    assert new.drift > 0.1
    for known, unknown in zip(old.layers, new.layers, strict=True):
        assert known.drift < 1e-4, known
        assert known.captured == pytest.approx(1, abs=1e-5)
        assert unknown.drift > 1e-3, unknown
        assert unknown.captured < 1


def test_drift_of_a_layer_is_that_of_its_rows() -> None:
    case = Case(nn.GRU(3, 4, 2, bidirectional=True), [2, 3], "packed, unsorted", has_state=False)
    module = case.module
    memory = sgp.GradientMemory(module, threshold=0.5, bias="freeze")
    memory.update([case.arguments[0]])
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    check, rows = memory.check(case.arguments[0]), get_expected(case)
    for layer in check.layers:
        block = memory.layers[layer.layer].block
        change = (getattr(module, block.weight).detach() - weights[block.weight]).double()
        x, earlier = rows[block.input].double(), weights[block.weight].double()
        expected = float((x @ change.mT).norm() / (x @ earlier.mT).norm())
        assert layer.drift == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l1_reverse", "bias_hh_l0"])
def test_unprojected_training_is_detected_in_every_parameter(name: str) -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=0.9)
    memory.update([make_packed(0)])
    with torch.no_grad():
        getattr(model.recurrent, name)[0] += 1e-3
    with pytest.raises(RuntimeError, match=rf"layer 'recurrent' .* \(recurrent.{name} has changed\)"):
        memory.update([make_packed(1)])


@nearly_full
def test_a_memory_is_the_same_after_save_and_load(tmp_path: Path) -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_packed(0)])
    memory.save(tmp_path / "memory.safetensors")
    again = sgp.GradientMemory.from_file(model, tmp_path / "memory.safetensors")
    assert again.subspaces["recurrent:input_l0"] is again.subspaces["recurrent:input_l0_reverse"]
    for name, subspace in memory.subspaces.items():
        for key, tensor in subspace.state_dict().items():
            assert torch.equal(again.subspaces[name].state_dict()[key], tensor)
    again.update([make_packed(1)])  # the fingerprints are those of the model
    assert again.tasks == 2


def check_protected_outputs(model: nn.Module, memory: sgp.GradientMemory) -> None:
    """Train a model with its memory, and assert that only outputs for other batches than the old one change."""
    with torch.no_grad():
        old, new = model(make_packed(0)), model(make_packed(1))
    optimizer = Adam(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    train(model, optimizer)
    with torch.no_grad():
        torch.testing.assert_close(model(make_packed(0)), old, rtol=0, atol=1e-5)
        assert float((model(make_packed(1)) - new).abs().max()) > 0.01


@nearly_full
def test_weights_that_load_state_dict_assigned_are_projected() -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_packed(0)])
    check_protected_outputs(model, memory)
    old = model.recurrent.weight_ih_l0
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert model.recurrent.weight_ih_l0 is not old
    memory.update([make_packed(0)])  # collects with the new weights
    check_protected_outputs(model, memory)


@nearly_full
def test_weights_assigned_between_two_steps_are_projected_by_the_same_hook() -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_packed(0)])
    with torch.no_grad():
        old = model(make_packed(0))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory.attach(optimizer)
    train(model, optimizer, 3)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 3)
    with torch.no_grad():
        torch.testing.assert_close(model(make_packed(0)), old, rtol=0, atol=1e-5)


@nearly_full
def test_a_deepcopy_of_memory_and_model_is_independent() -> None:
    model = Tagger()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_packed(0)])
    twin_memory = copy.deepcopy(memory)
    twin = twin_memory.model
    weights = copy.deepcopy(model.state_dict())
    check_protected_outputs(twin, twin_memory)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    check_protected_outputs(model, memory)


@pytest.mark.parametrize("by_weight", [True, False])
def test_a_projected_change_of_one_matrix_has_no_effect_on_old_rows(by_weight: bool) -> None:
    case = Case(nn.LSTM(12, 16), [2, 3], "packed, unsorted", has_state=True)
    memory = sgp.GradientMemory(nn.Sequential(case.module), threshold=1.0, alpha=math.inf)
    memory.update([case.arguments], forward=lambda batch: case.module(*batch))
    rows = get_expected(case)
    for name in ("input_l0", "hidden_l0") if by_weight else ("hidden_l0",):
        layer = memory.layers[f"0:{name}"]
        assert layer.bias is not None
        change, bias = torch.randn_like(layer.weight.tensor), torch.randn_like(layer.bias.tensor)
        found = memory.project(change, layer.name, bias)
        seen = rows[name] @ found[0].mT + found[1]
        torch.testing.assert_close(seen, torch.zeros_like(seen), rtol=0, atol=1e-5)
        assert float((found[0] - change).norm()) > 0.1


# A model that is sharded over two processes.


def train_as_one_process() -> dict[str, Tensor]:
    """Return the outcome of two tasks on all data, which all processes of a group share."""
    torch.manual_seed(0)
    model = Tagger()
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.recurrent)
        fully_shard(model)
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=3.0)
    optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-3)
    memory.attach(optimizer)
    for seed in range(2):
        memory.update([make_packed(seed)])
        train(model, optimizer, 5)
    return {name: gather_whole(parameter).clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_a_sharded_lstm_learns_what_a_whole_one_does(tmp_path: Path) -> None:
    run_processes(__file__, tmp_path)
    expected = train_as_one_process()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0)


def run_process(out: Path) -> None:
    """Run one of the processes."""
    dist.init_process_group("gloo")
    torch.save(train_as_one_process(), out / f"{dist.get_rank()}.pt")
    (out / f"{dist.get_rank()}.json").write_text(json.dumps({}))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))
    os._exit(0)  # the threads of the process group, which fully_shard keeps, may abort the interpreter at its end
