"""Diagonal of the Fisher information: how much each parameter moves the likelihood of single examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sgp.methods.calls import compute_gradients, record_calls
from sgp.methods.method import Batch, clone_tensors, use_mode
from sgp.projection.layer_types import get_layer_type

LogLikelihood = Callable[[Batch], Tensor]
# The input of each call of a layer, and the gradient of its output.
Calls = Sequence[tuple[Tensor, Tensor]]

# Gradients of examples with positions are computed for as many at a time as fit in this, and in a cache.
FLOATS_PER_CHUNK = 2**20
# Largest difference of two float32 sums of equal terms, as a share of the largest value that they can have.
ROUNDING = 1e-3

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Layers that multiply and shift their normalized input: per channel, or per entry of the last dimensions.
CHANNEL_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
LAST_NORMS = (nn.LayerNorm, nn.RMSNorm)


@torch.enable_grad()
def compute_sample_fisher(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batches: Iterable[Batch], log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """Compute F = mean_n g_n^2, with g_n the gradient of log p_n, the log-likelihood of example n.

    One backward pass of the sum over a batch yields delta_n, the gradient of each layer's output, and
    g_n = delta_n x_n^T. So F of a linear layer is (D^2)^T X^2 / N with rows delta_n and x_n; convolutions are linear in
    patches, and embeddings in one-hot rows. A layer that adds over positions adds before it squares. A parameter that
    these layers do not explain (a weight that is tied, used outside its module, or of another type) takes one backward
    pass for each example.

    The result is exact if the examples of a batch do not interact in the network. Where BatchNorm divides by the
    statistics of the batch they do, and delta_n also contains the effect of example n on the rest of the batch.

    Args:
        network: Network that log_likelihood runs, with examples along dimension 0 of every layer's input.
        parameters: Parameters to compute F for, by name.
        batches: Batches of examples.
        log_likelihood: Function that returns the log-likelihood of each example of a batch, [n], with a gradient. Any
            other result is a ValueError, and so is an empty iterable of batches.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    count = 0
    for batch in batches:
        for name, squares in _sum_squares(network, parameters, batch, log_likelihood).items():
            fisher[name] += squares
        count += len(batch[1])
    return _divide(fisher, count)


@torch.enable_grad()
def compute_batch_fisher(
    parameters: Mapping[str, nn.Parameter], batches: Iterable[Batch], log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """Compute F = 1/N sum_b B g_b^2, with g_b the gradient of the mean over batch b and B the size of the first batch.

    This is the form of the published code. The gradients of a batch cancel before they are squared, so F is about B
    times smaller than `compute_sample_fisher`. A smaller last batch counts as a whole one. The arguments and errors are
    those of `compute_sample_fisher`.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    count = size = 0
    for batch in batches:
        size = size or len(batch[1])
        gradients, _ = compute_gradients(_evaluate(batch, log_likelihood, parameters).mean(), parameters)
        for name, gradient in gradients.items():
            fisher[name].addcmul_(gradient, gradient, value=size)
        count += len(batch[1])
    return _divide(fisher, count)


def use_drawn_labels(network: nn.Module, log_likelihood: LogLikelihood) -> LogLikelihood:
    """Return the log-likelihood of labels drawn from the network's own output, in place of those of the batch.

    Drawn labels give the Fisher information as it is defined; the labels of the data give the "empirical" one.

    Args:
        network: Network whose output is the logits [n, classes].
        log_likelihood: Function that runs the network once.
    """

    def draw(batch: Batch) -> Tensor:
        outputs: list[Any] = []
        with network.register_forward_hook(lambda module, args, output: outputs.append(output)):
            log_likelihood(batch)
        logits = outputs[-1] if outputs else None
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"labels can be drawn only from logits [n, classes]; the network's output is {shape}")
        labels = torch.multinomial(logits.detach().softmax(dim=1), 1)
        return logits.log_softmax(dim=1).gather(1, labels).squeeze(1)

    return draw


@contextmanager
def preserve_state(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a network in train or eval mode; modes and buffers are restored afterwards."""
    buffers = clone_tensors(network.named_buffers())
    try:
        with use_mode(network, training=training):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                buffer.copy_(buffers[name])


class _GradientSums(NamedTuple):
    """Sums over the examples' gradients of one parameter.

    Attributes:
        total: Sum of the gradients.
        square: Sum of their squares.
        energy: Sum of their squared norms before positions cancel. Rounding errors are a share of it: the bias of an
            attention's keys, for instance, has no gradient but rounding.
    """

    total: Tensor
    square: Tensor
    energy: Tensor

    @classmethod
    def from_positions(cls, gradients: Tensor) -> _GradientSums:
        """Sum the gradients of a parameter that is added at every position. gradients: [n, positions, ...]."""
        each = gradients.sum(dim=1)
        energy = gradients.abs().sum(dim=1).square().sum()
        return cls(each.sum(dim=0), each.square().sum(dim=0), energy)

    def has_total(self, gradient: Tensor, count: int) -> bool:
        """Return whether the sum of `count` gradients is a given gradient, up to rounding."""
        # |sum_n g_n| <= sqrt(N sum_n |g_n|^2): sums of gradients that cancel are small, their rounding is not.
        return bool((self.total - gradient).norm() <= ROUNDING * (count * self.energy).sqrt())


def _sum_squares(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """Sum the squared gradients of a batch's examples, for each parameter that has any."""
    layers = _find_layers(network, parameters)
    with _expand_lookups(layers.values(), len(batch[1])), record_calls(layers) as calls:
        values = _evaluate(batch, log_likelihood, parameters)
    gradients, deltas = compute_gradients(values.sum(), parameters, calls, retain_graph=True)
    by_layer: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for call, delta in deltas:
        by_layer.setdefault(call.layer, []).append((call.input.detach(), delta))
    names = {id(parameter): name for name, parameter in parameters.items()}
    squares: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer, own in by_layer.items():
            module = layers[layer]
            for leaf, sums in _sum_layer(module, own, len(values)).items():
                name = names.get(id(module._parameters.get(leaf)))
                # If the sum is the gradient that autograd computed, the parameter is used nowhere else.
                if name in gradients and sums.has_total(gradients[name], len(values)):
                    squares[name] = sums.square
    rest = {name: parameters[name] for name in gradients if name not in squares}
    if rest:
        squares |= {name: torch.zeros_like(parameter) for name, parameter in rest.items()}
        for value in values:
            for name, gradient in compute_gradients(value, rest, retain_graph=True)[0].items():
                squares[name].addcmul_(gradient, gradient)
    return squares


def _evaluate(batch: Batch, log_likelihood: LogLikelihood, parameters: Mapping[str, nn.Parameter]) -> Tensor:
    values = log_likelihood(batch)
    if values.shape != (len(batch[1]),):
        raise ValueError(
            f"log_likelihood must return a number for each of {len(batch[1])} examples, got {tuple(values.shape)}"
        )
    if parameters and not values.requires_grad:
        raise ValueError("log_likelihood has no gradient: does it run the network under no_grad, or detach its output?")
    return values


def _divide(sums: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    if count == 0:
        raise ValueError("there are no examples to compute the Fisher information from")
    return {name: total / count for name, total in sums.items()}


def _find_layers(network: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Return the supported layers that own one of the parameters, by name."""
    wanted = {id(parameter) for parameter in parameters.values()}
    return {
        name: module
        for name, module in network.named_modules()
        if _is_supported(module) and any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    }


@contextmanager
def _expand_lookups(layers: Iterable[nn.Module], count: int) -> Iterator[None]:
    """Let an input that embeddings look up once for all examples, such as positions, become one for each.

    So each example has a gradient.
    """

    def expand(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if len(args) == 1 and args[0].dim() > 1 and len(args[0]) == 1:
            return (args[0].expand(count, *args[0].shape[1:]),)
        return None

    with ExitStack() as hooks:
        for module in layers:
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_pre_hook(expand))
        yield


def _is_supported(module: nn.Module) -> bool:
    # A subclass of a norm layer may do anything; layer types refuse subclasses with a forward of their own.
    if isinstance(module, nn.Linear | Convolution):
        return get_layer_type(module) is not None
    return type(module) in (*CHANNEL_NORMS, *LAST_NORMS, nn.Embedding)


def _sum_layer(module: nn.Module, calls: Calls, count: int) -> dict[str, _GradientSums]:
    """Sum the gradients of a layer's own parameters over all its calls."""
    if any(len(inputs) != count for inputs, _ in calls):
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": _sum_embedding(module, calls, count)}
    if not isinstance(module, nn.Linear | Convolution):
        return _sum_norm(module, calls)
    layer_type = get_layer_type(module)
    assert layer_type is not None
    groups = module.groups if isinstance(module, Convolution) else 1
    # [groups, n, positions, inputs] and [groups, n, positions, outputs]; a second call is like more positions.
    rows, deltas = [], []
    for given, delta in calls:
        inputs = layer_type.unfold_rows(module, given)
        rows.append(inputs.reshape(groups, count, -1, inputs.shape[-1]))
        if isinstance(module, Convolution):
            delta = delta.reshape(count, groups, delta.shape[1] // groups, -1).permute(1, 0, 3, 2)
        else:
            delta = delta.reshape(1, count, -1, delta.shape[-1])
        deltas.append(delta)
    X, D = torch.cat(rows, dim=2), torch.cat(deltas, dim=2)
    total, square = (part.reshape(module.weight.shape) for part in _sum_products(X, D))
    found = {"weight": _GradientSums(total, square, square.sum())}
    if module.bias is not None:
        by_position = D.transpose(0, 1).transpose(1, 2).reshape(count, D.shape[2], -1)
        found["bias"] = _GradientSums.from_positions(by_position)
    return found


def _sum_products(X: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Compute sum_n D_n^T X_n and sum_n (D_n^T X_n)^2, each [groups, outputs, inputs]."""
    if X.shape[2] == 1:
        x, d = X.squeeze(2), D.squeeze(2)
        return d.mT @ x, d.square().mT @ x.square()
    total = X.new_zeros(X.shape[0], D.shape[-1], X.shape[-1])
    square = torch.zeros_like(total)
    size = max(1, FLOATS_PER_CHUNK // total.numel())
    for x, d in zip(torch.split(X, size, dim=1), torch.split(D, size, dim=1), strict=True):
        each = d.mT @ x
        total += each.sum(dim=1)
        square += each.square_().sum(dim=1)
    return total, square


def _sum_embedding(module: nn.Embedding, calls: Calls, count: int) -> _GradientSums:
    ids = torch.cat([inputs.reshape(count, -1) for inputs, _ in calls], dim=1)
    deltas = torch.cat([delta.reshape(count, -1, module.embedding_dim) for _, delta in calls], dim=1)
    if module.padding_idx is not None:
        deltas = deltas * (ids != module.padding_idx).unsqueeze(-1)
    # Sum over the positions of a token inside each example.
    example = torch.arange(count, device=ids.device).unsqueeze(1)
    pairs, place = torch.unique(example * module.num_embeddings + ids, return_inverse=True)
    each = deltas.new_zeros(len(pairs), module.embedding_dim).index_add_(0, place.flatten(), deltas.flatten(0, 1))
    row = pairs % module.num_embeddings
    total, square = (torch.zeros_like(module.weight).index_add_(0, row, part) for part in (each, each.square()))
    return _GradientSums(total, square, square.sum())


def _sum_norm(module: nn.Module, calls: Calls) -> dict[str, _GradientSums]:
    own = module._parameters
    neutral_values = {"weight": torch.ones_like, "bias": torch.zeros_like}
    neutral = {leaf: fill(own[leaf]) for leaf, fill in neutral_values.items() if own.get(leaf) is not None}  # type: ignore[arg-type]
    # Copies, since a call in train mode updates the running statistics once more.
    neutral |= clone_tensors(module.named_buffers())
    parts: dict[str, list[Tensor]] = {}
    for inputs, delta in calls:
        normalized = torch.func.functional_call(module, neutral, (inputs,))
        for leaf, each in (("weight", delta * normalized), ("bias", delta)):
            parameter = own.get(leaf)
            if parameter is None:
                continue
            if isinstance(module, CHANNEL_NORMS):
                each = each.reshape(len(each), len(parameter), -1).transpose(1, 2)
            else:
                each = each.reshape(len(each), -1, *parameter.shape)
            parts.setdefault(leaf, []).append(each)
    return {leaf: _GradientSums.from_positions(torch.cat(each, dim=1)) for leaf, each in parts.items()}
