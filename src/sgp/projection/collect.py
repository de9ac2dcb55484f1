"""Streams the inputs of a model's layers into sufficient statistics, leaving no trace on the model."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import DataLoader, SequentialSampler

from sgp.projection.anchor import unwrap_module
from sgp.projection.caller_warning import warn_caller
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.layer_types import LayerType, get_layer_type
from sgp.projection.sharded import find_fsdp_modules, reshard
from sgp.projection.tokens import TokenCounts

# LocalRows of a convolution's input are unfolded for as many samples at a time as fit in this.
BYTES_PER_CHUNK = 64 * 2**20


def collect_inputs(
    model: nn.Module,
    batches: Iterable[Any],
    guards: Sequence[ProtectedLayer],
    *,
    forward: Callable[[Any], Any] | None = None,
    samples: Mapping[str, int | None],
    precise: Mapping[str, bool],
    mask: Callable[[Any], Tensor | None] | None = None,
    in_step: Callable[[Iterator[Any], Callable[[Any], Any]], None] | None = None,
) -> dict[str, InputGram]:
    """One pass over the batches: the statistic of every guard that saw an input.

    Guards that read the same tensors throughout, such as query, key and value, share one ``InputGram`` object.

    Args:
        model: runs in eval mode, without gradients; flags, buffers and random state are as before afterwards.
        batches: tensors, tuples whose first item is the input, or dicts passed as keywords.
        guards: what to gather for.
        forward: runs one batch through the model, for batches of any other kind.
        samples: per guard, how many samples to use; None for all.
        precise: per guard, whether to multiply in float64.
        mask: gives for a batch which positions count, [samples, positions], or None if all do. Without it that is
            the ``attention_mask`` of a batch that is a dict, or a tuple with one.
        in_step: runs batches where that is an affair of several processes. It may run the last one again, which does
            not count, and no pass is broken off in the middle.

    Raises:
        FloatingPointError: an input holds NaN or an infinity; the message names the layer.
        TypeError: the mask of a batch is no tensor.
        ValueError: there is no batch, or a batch or its mask cannot be understood.
    """
    collector = _Collector(model, guards, samples, precise, mask, breaks_off=in_step is None)
    run = forward or make_forward(model)
    limits = [samples[guard.name] for guard in guards]
    most = None if any(limit is None for limit in limits) else max(limit for limit in limits if limit is not None)
    with evaluation_pass(model, batches), collector.hooked():
        (in_step or _one_by_one)(collector.watched(batches, most), run)
    return collector.statistics


def _one_by_one(batches: Iterator[Any], run: Callable[[Any], Any]) -> None:
    for batch in batches:
        run(batch)


class _Collector:
    """Hooks that turn each call of a guarded module into rows."""

    def __init__(
        self,
        model: nn.Module,
        guards: Sequence[ProtectedLayer],
        samples: Mapping[str, int | None],
        precise: Mapping[str, bool],
        mask: Callable[[Any], Tensor | None] | None,
        *,
        breaks_off: bool,
    ) -> None:
        self.seen = 0  # samples of the batches that are done
        self._model = model
        self._samples = samples
        self._precise = precise
        self._mask_of = mask
        self._mask: Tensor | None = None
        self._call_mask: Tensor | None = None  # of the call that is being read
        self._batch: int | None = None  # its samples
        self._length: int | None = None  # their positions
        self._busy = True  # but while a batch is watched
        self._breaks_off = breaks_off
        self._failure: Exception | None = None
        self._readers: dict[
            str, list[tuple[ProtectedLayer, str]]
        ] = {}  # module -> its guards and the input that each reads
        for guard in guards:
            for source in guard.sources:
                self._readers.setdefault(source.module, []).append((guard, source.input))
        self._across = {name for name in self._readers if _lies_across(model, name)}
        self._shared: dict[str, _Shared] = {}  # guard -> whom it shares with
        self._begun: list[_Shared] = []  # those that began in this batch, whom others may join

    @property
    def statistics(self) -> dict[str, InputGram]:
        """Of every guard that saw an input; those that read the same tensors throughout have the same object.

        An input that the mask leaves nothing of was not seen.
        """
        return {name: shared.statistic for name, shared in self._shared.items() if shared.statistic.count}

    def watched(self, batches: Iterable[Any], most: int | None) -> Iterator[Any]:
        """Batches up to a number of samples; what the model does with one is seen until the next is asked for."""
        for batch in batches:
            batch = move_batch(batch, self._model)
            self._begin(batch)
            yield batch
            self._end()
            if most is not None and self.seen >= most:
                return
        if self.seen == 0:
            raise ValueError("the loader gave no batch: there is nothing to take a representation from")

    def _begin(self, batch: Any) -> None:
        self._mask = get_mask(batch, self._mask_of)
        self._batch = count_samples(batch, self._mask)
        shown = find_first_tensor(batch) if self._mask is None else self._mask
        self._length = None if shown is None or shown.dim() < 2 else shown.shape[1]
        self._busy = False

    def _end(self) -> None:
        self._busy = True
        if self._failure is not None:
            raise self._failure
        self.seen += self._batch or 1
        self._begun.clear()
        for shared in {id(shared): shared for shared in self._shared.values()}.values():
            self._part_late(shared)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, readers in self._readers.items():
                module = _find_module(self._model, name, readers[0][0])
                handle = module.register_forward_pre_hook(self._hook(name, readers), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _hook(self, name: str, readers: list[tuple[ProtectedLayer, str]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._busy or self._failure is not None:  # a layer type may call the module itself to see an inner input
                return
            self._busy = True
            try:
                layer_type = _type_of(module)
                inputs = layer_type.find_inputs(module, *args, **kwargs)
                self._call_mask = layer_type.find_mask(module, *args, **kwargs)
                for guard, key in readers:
                    if self._wanted(guard, len(inputs[key])):
                        self._read(name, guard, module, inputs[key])
            except Exception as error:
                if self._breaks_off:
                    raise
                self._failure = error  # the others are in the middle of this pass
            finally:
                self._busy = False

        return hook

    def _read(self, name: str, guard: ProtectedLayer, module: nn.Module, tensor: Tensor) -> None:
        """A guard sees a tensor: it is taken in once for all guards that have read the same ones so far."""
        shared = self._shared.get(guard.name)
        if shared is None:
            kind = self._kind(guard, module)
            shared = next((s for s in self._begun if s.kind == kind and s.is_of(tensor, self._call_mask)), None)
            if shared is None or kind is None:
                shared = _Shared(self._empty(guard, module, tensor), kind)
                self._begun.append(shared)
                shared.begin(tensor, self._call_mask, guard.name)
                self._add(name, guard, module, shared.statistic, tensor)
            shared.join(guard.name)
        elif guard.name in shared.arrived:
            # Its next call. Whoever has not come to the last one by now does not read what it reads.
            self._part_late(shared)
            if shared in self._begun:
                self._begun.remove(shared)
            shared.begin(tensor, self._call_mask, guard.name)
            self._add(name, guard, module, shared.statistic, tensor)
        elif shared.is_of(tensor, self._call_mask):
            shared.arrive(guard.name)
            return
        else:
            # One that has moved on to its next tensor holds its first one too, which this guard has not read.
            branch = next((b for b in shared.branches if b.begun == 1 and b.is_of(tensor, self._call_mask)), None)
            shared.leave(guard.name)
            if branch is None:
                branch = _Shared(shared.before_last(), shared.kind)
                shared.branches.append(branch)
                branch.begin(tensor, self._call_mask, guard.name)
                self._add(name, guard, module, branch.statistic, tensor)
            branch.join(guard.name)
            shared = branch
        self._shared[guard.name] = shared

    def _part_late(self, shared: _Shared) -> None:
        """Let those that have not come to the last tensor go their own way, together."""
        late = shared.late
        if late:
            branch = _Shared(shared.before_last(), shared.kind)
            for name in late:
                shared.leave(name)
                branch.join(name)
                self._shared[name] = branch
        shared.settle()

    def _kind(self, guard: ProtectedLayer, module: nn.Module) -> Hashable:
        """What guards must agree in to share; None for a tied weight, which gathers from several modules."""
        if len(guard.sources) > 1:
            return None
        unfolding = _type_of(module).get_sharing_key(module)
        is_across = guard.sources[0].module in self._across
        return unfolding, guard.bias is None, self._precise[guard.name], self._samples[guard.name], is_across

    def _wanted(self, guard: ProtectedLayer, items: int) -> int:
        """How many items along dimension 0 of an input belong to the samples that a guard still wants."""
        limit = self._samples[guard.name]
        if limit is None or self._batch is None or limit - self.seen >= self._batch:
            return items
        wanted = max(0, limit - self.seen)
        # Where samples were folded together with something else (windows, time), each has its share of the
        # items.
        return -(-items * wanted // self._batch)

    def _by_sample(self, name: str, layer_type: LayerType, tensor: Tensor) -> Tensor:
        """An input with samples along dimension 0, as far as it can be seen where they are.

        What is looked up once for the whole batch, such as the numbers of positions, counts for every sample of it:
        bases must not depend on how the data are batched.
        """
        if name in self._across and tensor.dim() > 2:
            tensor = tensor.transpose(0, 1)
        mask = self._mask if self._call_mask is None else None  # a call that has a mask has its samples first
        if mask is not None and layer_type.is_sequence_first(tensor, mask):
            tensor = tensor.transpose(0, 1)
        if not layer_type.is_lookup or self._batch is None:
            return tensor
        if tensor.dim() == 1 and len(tensor) == self._length != self._batch:
            tensor = tensor.unsqueeze(0)
        return tensor.expand(self._batch, *tensor.shape[1:]) if len(tensor) == 1 else tensor

    def _combine_masks(self) -> Tensor | None:
        """Return which positions of a call's inputs count: those that it has and that the batch's mask admits."""
        mask, call_mask = self._mask, self._call_mask
        if mask is None or call_mask is None:
            return mask if call_mask is None else call_mask
        return call_mask & mask.to(call_mask.device) if mask.shape == call_mask.shape else call_mask

    def _empty(self, guard: ProtectedLayer, module: nn.Module, tensor: Tensor) -> InputGram:
        layer_type = _type_of(module)
        if layer_type.is_lookup:
            return TokenCounts(guard.weight.tensor.shape[0])
        groups, _, inputs = layer_type.unfold_rows(module, tensor[:1]).shape
        return InputGram(groups, inputs, constant=guard.bias is not None, precise=self._precise[guard.name])

    def _add(self, name: str, guard: ProtectedLayer, module: nn.Module, statistic: InputGram, tensor: Tensor) -> None:
        layer_type = _type_of(module)
        tensor = self._by_sample(name, layer_type, tensor)
        wanted = self._wanted(guard, len(tensor))
        mask = self._combine_masks()
        if mask is not None and len(tensor) == 1:  # of all samples, such as the vectors of their positions
            mask = mask[: self._wanted(guard, len(mask))].any(0, keepdim=True)
        tensor = tensor[:wanted]
        if mask is not None:
            tensor = layer_type.apply_mask(tensor, mask[:wanted].to(tensor.device))
        step = max(1, BYTES_PER_CHUNK // max(1, layer_type.unfold_rows(module, tensor[:1]).nbytes))
        for chunk in torch.split(tensor, step):
            try:
                statistic.add(layer_type.unfold_rows(module, chunk))
            except FloatingPointError:
                raise FloatingPointError(
                    f"layer {name or '(model)'!r}: its input holds NaN or an infinity, or numbers too large to square; "
                    "the memory is as it was"
                ) from None
            except ValueError as error:
                raise ValueError(f"layer {name or '(model)'!r}: {error}") from None


class _Shared:
    """A statistic, and the guards that have read the same tensors so far, one after another.

    The first of them to read a tensor takes it in. The others are late until they have read it too, and if they read
    another one instead, they go on from the statistic as it was before.

    Attributes:
        statistic: what they have read.
        kind: what they agree in.
        begun: how many tensors they have read since they are together.
        arrived: those that have read the last tensor.
        branches: where those went on that read another tensor than the last one.
    """

    def __init__(self, statistic: InputGram, kind: Hashable) -> None:
        self.statistic = statistic
        self.kind = kind
        self.begun = 0
        self.arrived: set[str] = set()
        self.branches: list[_Shared] = []
        self._members: list[str] = []
        self._before: InputGram | None = None
        self._tensor: Callable[[], Tensor | None] = lambda: None
        self._mask: Tensor | None = None
        self._version = 0

    @property
    def late(self) -> list[str]:
        """Those that have not read the last tensor."""
        return [name for name in self._members if name not in self.arrived]

    def begin(self, tensor: Tensor, mask: Tensor | None, reader: str) -> None:
        """The next tensor; before it is taken in."""
        # A copy costs little beside the products that follow, and only groups need one.
        self._before = self.statistic.clone() if len(self._members) > 1 else None
        self._tensor, self._version, self._mask = weakref.ref(tensor), _version(tensor), mask
        self.begun += 1
        self.arrived = {reader}
        self.settle()

    def is_of(self, tensor: Tensor, mask: Tensor | None) -> bool:
        """Return whether this is the last tensor, unchanged since then and with the same mask of its call."""
        return self._tensor() is tensor and _version(tensor) == self._version and self._mask is mask

    def before_last(self) -> InputGram:
        """The statistic without the last tensor."""
        assert self._before is not None
        return self._before.clone()

    def join(self, name: str) -> None:
        """One more that has read all of it."""
        self._members.append(name)
        self.arrived.add(name)

    def arrive(self, name: str) -> None:
        """One that was late has read the last tensor too."""
        self.arrived.add(name)
        self.settle()

    def leave(self, name: str) -> None:
        """One that was late reads something else."""
        self._members.remove(name)

    def settle(self) -> None:
        """Once nobody is late any more, what was before is of no use."""
        if not self.late:
            self._before = None
            self.branches = []


def _version(tensor: Tensor) -> int:
    """Grows with every change in place; tensors of inference mode do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version


def _lies_across(model: nn.Module, name: str) -> bool:
    """Whether a module is a linear layer of one of torch's transformer layers with positions before samples."""
    above = unwrap_module(model.get_submodule(name.rpartition(".")[0]))
    if not isinstance(above, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return False
    is_linear = isinstance(unwrap_module(model.get_submodule(name)), nn.Linear)
    return is_linear and not unwrap_module(above.self_attn).batch_first


def _type_of(module: nn.Module) -> LayerType:
    """A source's own type, which need not be the guard's: tied weights may sit in layers of two types."""
    layer_type = get_layer_type(module)
    assert layer_type is not None
    return layer_type


def _find_module(model: nn.Module, name: str, layer: ProtectedLayer) -> nn.Module:
    """Return the module of a layer that was found under a name. It may have been wrapped since then."""
    found, weight = model.get_submodule(name), layer.weight.tensor
    for module in found.modules():
        if get_layer_type(module) is not None and any(parameter is weight for parameter in module.parameters()):
            return module
    return found


def move_batch(batch: Any, model: nn.Module) -> Any:
    """Return a batch with its CPU tensors on the device of a model's first parameter."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return batch if device.type in ("cpu", "meta") else _move(batch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == "cpu" else value
    if callable(getattr(value, "to", None)):  # PackedSequence, and the batches of transformers, which change in place
        return copy.copy(value).to(device)
    if isinstance(value, Mapping):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_move(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def make_forward(model: nn.Module) -> Callable[[Any], Any]:
    """How a batch of the usual kinds runs through a model."""

    def run(batch: Any) -> Any:
        try:
            if isinstance(batch, Tensor | PackedSequence):
                return model(batch)
            if isinstance(batch, Mapping):
                return model(**batch)
            if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor | PackedSequence):
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


def get_mask(batch: Any, mask: Callable[[Any], Tensor | None] | None) -> Tensor | None:
    """Which positions of a batch count, [samples, positions], or None if all do.

    Args:
        batch: of any kind.
        mask: tells it; without it that is the ``attention_mask`` of a batch that has one.

    Raises:
        TypeError: it gives no tensor.
        ValueError: it gives one of another shape.
    """
    found = find_attention_mask(batch) if mask is None else mask(batch)
    if found is None:
        return None
    if not isinstance(found, Tensor):
        raise TypeError(
            "mask must give a tensor [samples, positions] for a batch, or None if all positions count; it gave a "
            f"{type(found).__name__}"
        )
    if mask is not None:
        _refuse_unfit(found, [tensor.shape[0] for tensor in iterate_tensors(batch) if tensor.dim()])
    return found.bool()


def _refuse_unfit(mask: Tensor, sizes: list[int]) -> None:
    """``sizes``: of the first dimension of all that a batch has, whose first item need not be what the mask is of."""
    if mask.dim() != 2:
        raise ValueError(
            f"mask gave a tensor of shape {tuple(mask.shape)}: it must be [samples, positions], true where a position "
            "counts"
        )
    if sizes and len(mask) not in sizes:
        raise ValueError(
            f"mask gave {len(mask)} rows, of shape {tuple(mask.shape)}, for a batch of {sizes[0]} samples: it must be "
            "[samples, positions]"
        )


def find_attention_mask(batch: Any) -> Tensor | None:
    """Which positions of a batch are no padding, as transformers say it; None where nothing is said.

    A tuple or list may hold the dict that says it, beside labels for instance. Where several do, none is of the whole.
    """
    items = batch if isinstance(batch, tuple | list) else [batch]
    said = [item["attention_mask"] for item in items if isinstance(item, Mapping) and "attention_mask" in item]
    mask = said[0] if len(said) == 1 else None
    # Masks of more dimensions say who may look at whom, not who is there.
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and dicts; a packed sequence is one, padded, with its samples first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield pad_packed_sequence(value, batch_first=True)[0]
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_tensors(item)


def find_first_tensor(value: Any) -> Tensor | None:
    """The first tensor in nested tuples, lists and dicts."""
    return next(iterate_tensors(value), None)


def count_samples(batch: Any, mask: Tensor | None = None) -> int | None:
    """How many samples a batch has, if that can be seen. A mask has a row for each."""
    tensor = find_first_tensor(batch) if mask is None else mask
    return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def _samplers(batches: Iterable[Any]) -> list[object]:
    """What draws a loader's indices: its batch sampler and the sampler behind that, which may not be the
    loader's own."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    # Accelerate's, which gives each process its share of another one's batches.
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(batches, "sampler", None)
    return [batch_sampler, sampler]


def find_sampler(batches: Iterable[Any]) -> object:
    """What draws a loader's indices, if it is one."""
    return _samplers(batches)[-1]


def warn_unless_shuffled(batches: Iterable[Any]) -> None:
    """Some samples of sorted data do not stand for all of them."""
    if isinstance(batches, DataLoader) and isinstance(find_sampler(batches), SequentialSampler):
        warn_caller(
            "samples= takes the first samples of a loader that does not shuffle: if the data are sorted, "
            "by class for instance, they do not represent the task"
        )


@contextmanager
def evaluation_pass(model: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    """Eval mode without gradients; training flags, buffers and every random state come back as they were.

    What a forward pass has gathered of a sharded model is let go of.
    """
    modes = {module: module.training for module in model.modules()}
    # Eval mode leaves running statistics alone, but not every module has only those.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None and not isinstance(buffer, UninitializedBuffer)
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # Dynamo takes seconds to load; as long as it is not, nothing has been compiled.
    is_dynamo_loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_dynamo_loaded else nullcontext()
    with preserve_random_state(batches), torch.no_grad(), eager:
        try:
            # The fused transformer kernels skip the modules inside, and with them the hooks.
            torch.backends.mha.set_fastpath_enabled(False)
            model.eval()
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            reshard(find_fsdp_modules(model))
            for module, training in modes.items():
                module.training = training
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def preserve_random_state(batches: Iterable[Any] = ()) -> Iterator[None]:
    """Random state of torch, numpy, Python and of a loader's own generators is the same after as before."""
    found = [getattr(owner, "generator", None) for owner in (batches, *_samplers(batches))]
    generators = {id(g): g for g in found if isinstance(g, torch.Generator)}.values()
    states = [generator.get_state() for generator in generators]
    python, legacy = random.getstate(), np.random.get_state()
    device = torch.accelerator.current_accelerator() or torch.device("cuda")
    devices = range(torch.get_device_module(device).device_count())
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
