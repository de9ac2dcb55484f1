"""The diagonal of the Fisher information: how much each parameter moves the likelihood of single examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sgp.methods.method import Batch
from sgp.projection.layer_types import get_layer_type

LogLikelihood = Callable[[Batch], Tensor]

# Gradients of examples with positions are formed for as many at a time as fit in this, and in a cache.
FLOATS_PER_CHUNK = 2**20
# Largest difference of two float32 sums that mean the same, as a share of the largest that they can be.
ROUNDING = 1e-3

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
# Layers that multiply and shift what they have normalised: per channel, or per entry of the last dimensions.
CHANNEL_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
LAST_NORMS = (nn.LayerNorm, nn.RMSNorm)


@torch.enable_grad()
def fisher_of_samples(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batches: Iterable[Batch], log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """F = mean_n g_n^2, with g_n the gradient of log p_n, the log-likelihood of example n.

    One backward pass of the sum over a batch shows delta_n, the gradient of each layer's output, and
    g_n = delta_n x_n^T: so F of a linear layer is (D^2)^T X^2 / N with rows delta_n and x_n, convolutions are linear on
    patches, and embeddings on rows of which one entry is 1. Layers that add over positions add before they square. What
    these layers do not explain (weights that are tied, used without their module, or of other types) takes a backward
    pass for each example.

    It is exact where examples do not meet in the network. Where BatchNorm divides by the statistics of the batch they
    do, and delta_n has what example n changes in the whole batch.

    Args:
        network: what log_likelihood runs, with the examples along dimension 0 of every layer's input.
        parameters: those that are asked for, by name.
        batches: examples.
        log_likelihood: of each example of a batch, [n].

    Raises:
        ValueError: there are no examples, or what log_likelihood gives is not what it should.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    seen = 0
    for batch in batches:
        for name, squares in _squares(network, parameters, batch, log_likelihood).items():
            fisher[name] += squares
        seen += len(batch[1])
    return _mean(fisher, seen)


@torch.enable_grad()
def fisher_of_batches(
    parameters: Mapping[str, nn.Parameter], batches: Iterable[Batch], log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """F = 1/N sum_b B g_b^2, with g_b the gradient of the mean over batch b and B the size of the first batch.

    The published form. Gradients of a batch cancel before they are squared, so it is about B times smaller than that of
    single examples. A last batch that is smaller counts as a whole one.

    Args: as for `fisher_of_samples`.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    seen = size = 0
    for batch in batches:
        size = size or len(batch[1])
        gradients = _gradients(_values(batch, log_likelihood).mean(), parameters)
        for name, gradient in gradients.items():
            fisher[name].addcmul_(gradient, gradient, value=size)
        seen += len(batch[1])
    return _mean(fisher, seen)


def with_drawn_labels(network: nn.Module, log_likelihood: LogLikelihood) -> LogLikelihood:
    """The log-likelihood of labels that are drawn from the network's own answer, in place of those of the batch.

    Their expectation is what the Fisher information is by definition; the labels of the data give the "empirical" one.

    Args:
        network: its output must be the logits [n, classes].
        log_likelihood: runs the network once.
    """

    def drawn(batch: Batch) -> Tensor:
        answers: list[Any] = []
        handle = network.register_forward_hook(lambda module, args, output: answers.append(output))
        try:
            log_likelihood(batch)
        finally:
            handle.remove()
        logits = answers[-1] if answers else None
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"labels can be drawn only from logits [n, classes]; the network's output is {shape}")
        labels = torch.multinomial(logits.detach().softmax(dim=1), 1)
        return logits.log_softmax(dim=1).gather(1, labels).squeeze(1)

    return drawn


@contextmanager
def in_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode; modes and buffers are as before afterwards."""
    modes = {module: module.training for module in network.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    network.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                buffer.copy_(buffers[name])


@dataclass
class _Call:
    """One call of a layer: its input, and the gradient of its output once a backward pass has come by."""

    input: Tensor
    deltas: list[Tensor] = field(default_factory=list)


class _Account(NamedTuple):
    """What a layer's calls say of one of its parameters.

    Attributes:
        total: the sum of the examples' gradients.
        square: that of their squares.
        energy: that of their squared norms before positions cancel, which is what rounding is a share of. The bias of
            an attention's keys has no gradient but rounding.
    """

    total: Tensor
    square: Tensor
    energy: Tensor


def _squares(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Batch, log_likelihood: LogLikelihood
) -> dict[str, Tensor]:
    """The sum over a batch of each example's squared gradient, of those parameters that have any."""
    calls: dict[nn.Module, list[_Call]] = {}
    with _watched(network, parameters, len(batch[1]), calls):
        values = _values(batch, log_likelihood)
        gradients = _gradients(values.sum(), parameters, retain_graph=True)
    names = {id(parameter): name for name, parameter in parameters.items()}
    squares: dict[str, Tensor] = {}
    with torch.no_grad():
        for module, made in calls.items():
            for leaf, account in _explained(module, made, len(values)).items():
                name = names.get(id(module._parameters.get(leaf)))
                # The layer's account is good if it gives the gradient that autograd found: then the parameter has no
                # other use.
                if name in gradients and _is_right(account, gradients[name], len(values)):
                    squares[name] = account.square
    rest = {name: parameters[name] for name in gradients if name not in squares}
    if rest:
        squares |= {name: torch.zeros_like(parameter) for name, parameter in rest.items()}
        for value in values:
            for name, gradient in _gradients(value, rest, retain_graph=True).items():
                squares[name].addcmul_(gradient, gradient)
    return squares


def _is_right(account: _Account, gradient: Tensor, count: int) -> bool:
    # |sum_n g_n| <= sqrt(N sum_n |g_n|^2): sums of gradients that cancel are small, their rounding is not.
    return bool((account.total - gradient).norm() <= ROUNDING * (count * account.energy).sqrt())


def _values(batch: Batch, log_likelihood: LogLikelihood) -> Tensor:
    """The log-likelihood of each example.

    Raises:
        ValueError: it is not one number for each example.
    """
    values = log_likelihood(batch)
    if values.shape != (len(batch[1]),):
        raise ValueError(
            f"log_likelihood must give a number for each of {len(batch[1])} examples, got {tuple(values.shape)}"
        )
    return values


def _gradients(
    value: Tensor, parameters: Mapping[str, nn.Parameter], *, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Of those parameters that a value depends on. Nothing is left in .grad, and no hook on parameters acts.

    Raises:
        ValueError: the value has no graph.
    """
    if not parameters:
        return {}
    if not value.requires_grad:
        raise ValueError("log_likelihood has no gradient: does it run the network under no_grad, or detach its output?")
    found = torch.autograd.grad(value, list(parameters.values()), retain_graph=retain_graph, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _mean(sums: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    if count == 0:
        raise ValueError("there are no examples to find the Fisher information from")
    return {name: total / count for name, total in sums.items()}


@contextmanager
def _watched(
    network: nn.Module, parameters: Mapping[str, nn.Parameter], count: int, calls: dict[nn.Module, list[_Call]]
) -> Iterator[None]:
    """Write down the calls of all layers that have such parameters and can be explained, and a backward pass."""
    wanted = {id(parameter) for parameter in parameters.values()}

    def apart(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        # What is looked up once for all examples, such as positions: once for each, so that each has a gradient.
        if len(args) == 1 and args[0].dim() > 1 and len(args[0]) == 1:
            return (args[0].expand(count, *args[0].shape[1:]),)
        return None

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            call = _Call((args[0] if args else kwargs["input"]).detach())
            # A hook on the tensor, since it may be changed in place later: the gradient is that of now.
            handles.append(output.register_hook(call.deltas.append))  # type: ignore[no-untyped-call]
            calls.setdefault(module, []).append(call)

    layers = [
        module
        for module in network.modules()
        if _can_explain(module) and any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    ]
    handles = [module.register_forward_hook(seen, with_kwargs=True) for module in layers]
    handles += [module.register_forward_pre_hook(apart) for module in layers if isinstance(module, nn.Embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _can_explain(module: nn.Module) -> bool:
    # A subclass of a norm layer may do anything; those of the others are known not to have a forward of their own.
    if isinstance(module, nn.Linear | Convolution):
        return get_layer_type(module) is not None
    return type(module) in (*CHANNEL_NORMS, *LAST_NORMS, nn.Embedding)


def _explained(module: nn.Module, calls: list[_Call], count: int) -> dict[str, _Account]:
    """Of a layer's own parameters, from all its calls."""
    calls = [call for call in calls if call.deltas]
    if not calls or any(len(call.input) != count for call in calls):
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": _of_embedding(module, calls, count)}
    if not isinstance(module, nn.Linear | Convolution):
        return _of_norm(module, calls)
    layer_type = get_layer_type(module)
    assert layer_type is not None
    groups = module.groups if isinstance(module, Convolution) else 1
    # [groups, n, positions, inputs] and [groups, n, positions, outputs]; a second call is like more positions.
    rows, deltas = [], []
    for call in calls:
        inputs, (delta,) = layer_type.unfold_rows(module, call.input), call.deltas
        rows.append(inputs.reshape(groups, count, -1, inputs.shape[-1]))
        if isinstance(module, Convolution):
            delta = delta.reshape(count, groups, delta.shape[1] // groups, -1).permute(1, 0, 3, 2)
        else:
            delta = delta.reshape(1, count, -1, delta.shape[-1])
        deltas.append(delta)
    X, D = torch.cat(rows, dim=2), torch.cat(deltas, dim=2)
    total, square = (part.reshape(module.weight.shape) for part in _sums_of_products(X, D))
    found = {"weight": _Account(total, square, square.sum())}
    if module.bias is not None:
        found["bias"] = _added(D.transpose(0, 1).transpose(1, 2).reshape(count, D.shape[2], -1))
    return found


def _added(each: Tensor) -> _Account:
    """Of a parameter that is added at every position: the gradients there are [n, positions, ...]."""
    alone = each.sum(dim=1)
    return _Account(alone.sum(dim=0), alone.square().sum(dim=0), each.abs().sum(dim=1).square().sum())


def _sums_of_products(X: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """sum_n D_n^T X_n and sum_n (D_n^T X_n)^2, each [groups, outputs, inputs]."""
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


def _of_embedding(module: nn.Embedding, calls: list[_Call], count: int) -> _Account:
    ids = torch.cat([call.input.reshape(count, -1) for call in calls], dim=1)
    deltas = torch.cat([call.deltas[0].reshape(count, -1, module.embedding_dim) for call in calls], dim=1)
    if module.padding_idx is not None:
        deltas = deltas * (ids != module.padding_idx).unsqueeze(-1)
    # A row of an example has the sum over the places where it stands there.
    example = torch.arange(count, device=ids.device).unsqueeze(1)
    pairs, place = torch.unique(example * module.num_embeddings + ids, return_inverse=True)
    each = deltas.new_zeros(len(pairs), module.embedding_dim).index_add_(0, place.flatten(), deltas.flatten(0, 1))
    row = pairs % module.num_embeddings
    total, square = (torch.zeros_like(module.weight).index_add_(0, row, part) for part in (each, each.square()))
    return _Account(total, square, square.sum())


def _of_norm(module: nn.Module, calls: list[_Call]) -> dict[str, _Account]:
    own = module._parameters
    plain = {"weight": torch.ones_like, "bias": torch.zeros_like}
    neutral = {leaf: make(own[leaf]) for leaf, make in plain.items() if own.get(leaf) is not None}  # type: ignore[arg-type]
    # Copies, since a call in training mode counts the batch once more.
    neutral |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    parts: dict[str, list[Tensor]] = {}
    for call in calls:
        (delta,) = call.deltas
        normalised = torch.func.functional_call(module, neutral, (call.input,))
        for leaf, each in (("weight", delta * normalised), ("bias", delta)):
            parameter = own.get(leaf)
            if parameter is not None:
                n = len(each)
                if isinstance(module, CHANNEL_NORMS):
                    each = each.reshape(n, len(parameter), -1).transpose(1, 2)
                else:
                    each = each.reshape(n, -1, *parameter.shape)
                parts.setdefault(leaf, []).append(each)
    return {leaf: _added(torch.cat(made, dim=1)) for leaf, made in parts.items()}
