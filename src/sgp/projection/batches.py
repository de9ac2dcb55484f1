"""Batches: their samples and masks, how a model runs them, and evaluation passes that leave no trace on the model."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import DataLoader, SequentialSampler

from sgp.projection.caller_warning import warn_caller
from sgp.projection.sharded import find_fsdp_modules, reshard


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
    """Return a function that runs a tensor, a tuple, a list or a dict through a model."""

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
    """Return which positions of a batch count, [samples, positions], or None if all do.

    Args:
        batch: Batch of any kind.
        mask: Function that returns the mask of a batch. Without it, the batch's ``attention_mask`` is used if it has
            one.

    Raises:
        TypeError: The mask is not a tensor.
        ValueError: The mask of the function has another shape than [samples, positions].
    """
    found = find_attention_mask(batch) if mask is None else mask(batch)
    if found is None:
        return None
    if not isinstance(found, Tensor):
        raise TypeError(
            "mask must give a tensor [samples, positions] for a batch, or None if all positions count; it gave a "
            f"{type(found).__name__}"
        )
    if mask is not None:  # it may belong to any tensor of the batch
        sizes = [tensor.shape[0] for tensor in iterate_tensors(batch) if tensor.dim()]
        if found.dim() != 2 or len(found) not in (sizes or [len(found)]):
            raise ValueError(
                f"mask gave a tensor of shape {tuple(found.shape)} for tensors of {sizes} samples: it must be "
                "[samples, positions], true where a position counts"
            )
    return found.bool()


def find_attention_mask(batch: Any) -> Tensor | None:
    """Return the ``attention_mask`` of a dict, or of the only dict in a tuple or list that has one; otherwise None."""
    items = batch if isinstance(batch, tuple | list) else [batch]
    masks = [item["attention_mask"] for item in items if isinstance(item, Mapping) and "attention_mask" in item]
    mask = masks[0] if len(masks) == 1 else None
    # A mask of more dimensions says which positions attend to which, not which are padding.
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
    """Return the first tensor in nested tuples, lists and dicts; None if there is none."""
    return next(iterate_tensors(value), None)


def count_samples(batch: Any, mask: Tensor | None = None) -> int | None:
    """Return the number of samples of a batch, or None if it has no tensor. A mask has one row for each sample."""
    tensor = find_first_tensor(batch) if mask is None else mask
    return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def _find_samplers(batches: Iterable[Any]) -> list[object]:
    """Return the batch sampler of a loader and the sampler behind it, which may not be the loader's own."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    # Accelerate wraps the batch sampler to give each process its share of the batches.
    batch_sampler = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(batches, "sampler", None)
    return [batch_sampler, sampler]


def find_sampler(batches: Iterable[Any]) -> object:
    """Return the sampler that draws a loader's indices; None for other iterables."""
    return _find_samplers(batches)[-1]


def warn_unless_shuffled(batches: Iterable[Any]) -> None:
    """Warn if the first samples of a loader may not represent all of its data."""
    if isinstance(batches, DataLoader) and isinstance(find_sampler(batches), SequentialSampler):
        warn_caller(
            "samples= takes the first samples of a loader that does not shuffle: if the data are sorted, "
            "by class for instance, they do not represent the task"
        )


@contextmanager
def evaluation_pass(model: nn.Module, batches: Iterable[Any]) -> Iterator[None]:
    """Put a model in eval mode without gradients; restore training flags, buffers and every random state afterwards.

    Parameters that a forward pass of a sharded model has gathered are sharded again.
    """
    modes = {module: module.training for module in model.modules()}
    # Eval mode protects BatchNorm statistics, but a module may have other buffers that its forward changes.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module._buffers.items()
        if buffer is not None and not isinstance(buffer, UninitializedBuffer)
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # Importing Dynamo takes seconds; as long as it is not imported, nothing has been compiled.
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
                if not (buffer.is_meta or torch.equal(buffer, value)):
                    buffer.copy_(value)


@contextmanager
def preserve_random_state(batches: Iterable[Any] = ()) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and of a loader's own generators afterwards."""
    found = [getattr(owner, "generator", None) for owner in (batches, *_find_samplers(batches))]
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
