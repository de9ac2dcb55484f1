"""Streams the inputs of a model's layers into sufficient statistics, leaving no trace on the model."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.utils.data import DataLoader, SequentialSampler

from sgp.projection.layers import LayerType, layer_type_of
from sgp.projection.layout import Guard
from sgp.projection.statistic import Statistic

# Rows of a convolution's input are unfolded for as many samples at a time as fit in this.
BYTES_PER_CHUNK = 64 * 2**20


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    guards: Sequence[Guard],
    *,
    forward: Callable[[Any], Any] | None = None,
    samples: Mapping[str, int | None],
    precise: Mapping[str, bool],
) -> dict[str, Statistic]:
    """One pass over the batches: the statistic of every guard that saw an input.

    Guards that read the same tensor in every call share one ``Statistic`` object.

    Args:
        model: runs in eval mode, without gradients; flags, buffers and random state are as before afterwards.
        batches: tensors, tuples whose first item is the input, or dicts passed as keywords.
        guards: what to gather for.
        forward: runs one batch through the model, for batches of any other kind.
        samples: per guard, how many samples to use; None for all.
        precise: per guard, whether to multiply in float64.

    Raises:
        FloatingPointError: an input holds NaN or an infinity; the message names the layer.
        ValueError: there is no batch, or a batch cannot be understood.
    """
    collector = _Collector(model, guards, samples, precise)
    run = forward or forward_of(model)
    limits = [samples[guard.name] for guard in guards]
    most = None if any(limit is None for limit in limits) else max(limit for limit in limits if limit is not None)
    if any(limit is not None for limit in limits):
        _warn_unless_shuffled(batches)
    with no_trace(model, batches), collector.hooked():
        for batch in batches:
            collector.begin(batch)
            run(batch)
            collector.end()
            if most is not None and collector.seen >= most:
                break
    if collector.seen == 0:
        raise ValueError("the loader gave no batch: there is nothing to take a representation from")
    return collector.statistics


class _Collector:
    """Hooks that turn each call of a guarded module into rows."""

    def __init__(
        self,
        model: nn.Module,
        guards: Sequence[Guard],
        samples: Mapping[str, int | None],
        precise: Mapping[str, bool],
    ) -> None:
        self.seen = 0  # samples of the batches that are done
        self.statistics: dict[str, Statistic] = {}
        self._model = model
        self._samples = samples
        self._precise = precise
        self._batch: int | None = None
        self._busy = False
        self._readers: dict[str, list[tuple[Guard, str]]] = {}  # module -> its guards and the input that each reads
        for guard in guards:
            for source in guard.sources:
                self._readers.setdefault(source.module, []).append((guard, source.input))

    def begin(self, batch: Any) -> None:
        self._batch = _size(batch)

    def end(self) -> None:
        self.seen += self._batch or 1

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, readers in self._readers.items():
                module = self._model.get_submodule(name)
                handle = module.register_forward_pre_hook(self._hook(name, readers), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, name: str, readers: list[tuple[Guard, str]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._busy:  # a layer type may call the module itself to see an inner input
                return
            self._busy = True
            try:
                inputs = _type_of(module).inputs(module, *args, **kwargs)
                self._take(name, module, [(guard, inputs[key]) for guard, key in readers])
            finally:
                self._busy = False

        return hook

    def _take(self, name: str, module: nn.Module, pairs: list[tuple[Guard, Tensor]]) -> None:
        """Add one call's inputs; a tensor is unfolded once for all guards that have read the same so far."""
        pairs = [(guard, tensor) for guard, tensor in pairs if self._wanted(guard, tensor)]
        new: dict[tuple[object, ...], Statistic] = {}
        reads: dict[int, int] = {}  # statistic -> the tensor it takes in this call
        parted: dict[tuple[int, int], Statistic] = {}
        plan: dict[int, tuple[Guard, Statistic, Tensor]] = {}
        for guard, tensor in pairs:
            if len(guard.sources) > 1:  # a tied weight gathers from several modules, on its own
                statistic = self.statistics.setdefault(guard.name, self._empty(guard, module, tensor))
                self._add(name, guard, module, statistic, tensor)
                continue
            if guard.name not in self.statistics:
                key = (id(tensor), guard.bias is None, self._precise[guard.name], self._samples[guard.name])
                if key not in new:
                    new[key] = self._empty(guard, module, tensor)
                self.statistics[guard.name] = new[key]
            statistic = self.statistics[guard.name]
            if reads.setdefault(id(statistic), id(tensor)) != id(tensor):
                # What was the same input until now is not any more: the copy goes its own way from here.
                key_parted = (id(statistic), id(tensor))
                statistic = parted.setdefault(key_parted, statistic.clone())
                self.statistics[guard.name] = statistic
                reads[id(statistic)] = id(tensor)
            plan[id(statistic)] = (guard, statistic, tensor)
        for guard, statistic, tensor in plan.values():
            self._add(name, guard, module, statistic, tensor)

    def _wanted(self, guard: Guard, tensor: Tensor) -> int:
        """How many items along dimension 0 of an input belong to the samples that a guard still wants."""
        limit = self._samples[guard.name]
        items = tensor.shape[0]
        if limit is None or self._batch is None or limit - self.seen >= self._batch:
            return items
        wanted = max(0, limit - self.seen)
        # Where samples were folded together with something else (windows, time), each has its share of the
        # items.
        return -(-items * wanted // self._batch)

    def _empty(self, guard: Guard, module: nn.Module, tensor: Tensor) -> Statistic:
        groups, _, inputs = _type_of(module).rows(module, tensor[:1]).shape
        return Statistic(groups, inputs, constant=guard.bias is not None, precise=self._precise[guard.name])

    def _add(self, name: str, guard: Guard, module: nn.Module, statistic: Statistic, tensor: Tensor) -> None:
        layer_type = _type_of(module)
        per_item = layer_type.rows(module, tensor[:1]).nbytes
        step = max(1, BYTES_PER_CHUNK // max(1, per_item))
        for chunk in torch.split(tensor[: self._wanted(guard, tensor)], step):
            try:
                statistic.add(layer_type.rows(module, chunk))
            except FloatingPointError:
                raise FloatingPointError(
                    f"layer {name or '(model)'!r}: its input holds NaN or an infinity, or numbers too large to square; "
                    "the memory is as it was"
                ) from None
            except ValueError as error:
                raise ValueError(f"layer {name or '(model)'!r}: {error}") from None


def _type_of(module: nn.Module) -> LayerType:
    """A source's own type, which need not be the guard's: tied weights may sit in layers of two types."""
    layer_type = layer_type_of(module)
    assert layer_type is not None
    return layer_type


def forward_of(model: nn.Module) -> Callable[[Any], Any]:
    """How a batch of the usual kinds runs through a model."""

    def run(batch: Any) -> Any:
        try:
            if isinstance(batch, Tensor):
                return model(batch)
            if isinstance(batch, Mapping):
                return model(**batch)
            if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
                return model(batch[0])
        except TypeError as error:
            error.add_note(
                "sgp ran a batch as model(input) or model(**batch); if the model needs more, such as a task, give "
                "forward=, for instance forward=lambda batch: model(batch[0], task)"
            )
            raise
        raise ValueError(
            f"a batch of type {type(batch).__name__} is not understood: give tensors, tuples whose first "
            "item is the input, dicts of keywords, or forward="
        )

    return run


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return next((found for item in value if (found := first_tensor(item)) is not None), None)
    return None


def _size(batch: Any) -> int | None:
    tensor = first_tensor(batch)
    return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def _samplers(batches: Iterable[Any]) -> list[object]:
    """What draws a loader's indices: its batch sampler and the sampler behind that, which may not be the
    loader's own."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(batches, "sampler", None)
    return [batch_sampler, sampler]


def _warn_unless_shuffled(batches: Iterable[Any]) -> None:
    if isinstance(batches, DataLoader) and isinstance(_samplers(batches)[-1], SequentialSampler):
        warnings.warn(
            "samples= takes the first samples of a loader that does not shuffle: if the data are sorted, "
            "by class for instance, they do not stand for the task",
            stacklevel=4,
        )


@contextmanager
def no_trace(model: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    """Eval mode without gradients; training flags, buffers and every random state come back as they were."""
    modes = {module: module.training for module in model.modules()}
    # Eval mode leaves running statistics alone, but not every module has only those.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None and not isinstance(buffer, UninitializedBuffer)
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with random_state_kept(batches), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            # The fused transformer kernels skip the modules inside, and with them the hooks.
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, training in modes.items():
                module.training = training
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def random_state_kept(batches: Iterable[Any] = ()) -> Iterator[None]:
    """Random state of torch, numpy, Python and of a loader's own generators is the same after as before."""
    found = [getattr(owner, "generator", None) for owner in (batches, *_samplers(batches))]
    generators = {id(g): g for g in found if isinstance(g, torch.Generator)}.values()
    states = [generator.get_state() for generator in generators]
    python, legacy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
