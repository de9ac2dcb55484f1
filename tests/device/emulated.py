"""A device for tests on machines without one: tensors of ``torch.device("emulated")`` are hidden CPU tensors.

Every operation is intercepted, so the device is as strict as a real one, and what happens on it can be counted:

- An operation that mixes devices raises, but for copies, tensors without dimensions and indices, as on CUDA.
- A generator of the CPU raises. The device has a random state of its own.
- With ``EMULATOR.has_float64 = False`` a float64 tensor raises, as on MPS.
- With ``EMULATOR.rounds_products = True`` matrix products and convolutions round their factors to the 10 bits of TF32,
  unless ``torch.backends.cuda.matmul`` asks for full precision (``torch.set_float32_matmul_precision`` sets that too).
- ``with EMULATOR.count() as counts`` counts kernels, host synchronizations and copies to the device by source line.

It needs torch 2.9 and is registered for the whole process. It is no proof that anything runs on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAME = "emulated"
DEVICE = torch.device("cpu")  # until the device is registered
HOST = torch.device("cpu")

aten = torch.ops.aten
# The host must synchronize with the device for these results.
SYNCHRONIZING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.bincount.default,  # the size of its result depends on the data
}
# These operations copy tensors of the CPU to the device.
MOVING = {aten.copy_.default, aten._foreach_copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "dot"}
PRODUCTS |= {"convolution", "convolution_backward", "_addmm_activation"}
AUTOCAST = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d")


@dataclass
class Counts:
    """Operations of the device by the line of the package or the test that caused them."""

    kernels: Counter[str] = field(default_factory=Counter)
    synchronizations: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)


class Emulator:
    """The switches of the device and its random state."""

    def __init__(self) -> None:
        self.has_float64 = True
        self.rounds_products = False
        self.random_state = torch.Generator().manual_seed(1).get_state()
        self._counts: list[Counts] = []

    @contextmanager
    def count(self) -> Iterator[Counts]:
        """Count the operations of the device inside the block.

        Yields:
            The counts.
        """
        counts = Counts()
        self._counts.append(counts)
        try:
            yield counts
        finally:
            self._counts.remove(counts)

    def note(self, kind: str) -> None:
        """Count an event at the source line that is running."""
        for counts in self._counts:
            getattr(counts, kind)[_find_line()] += 1

    def run(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on the hidden tensors."""
        self._check(operation, args, kwargs)
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        is_download = target is not None and target.type != NAME
        # The size of a selection by a mask depends on the data.
        has_mask = operation in INDEXING and torch.bool in _list_dtypes(args)
        if operation in SYNCHRONIZING or is_download or has_mask:
            self.note("synchronizations")
        elif not operation.is_view:
            self.note("kernels")
        inner_args, inner_kwargs = pytree.tree_map_only(EmulatedTensor, lambda t: t.inner, (args, kwargs))
        if target is not None:
            inner_kwargs["device"] = HOST if target.type == NAME else target
        if self._is_rounded(operation):
            inner_args = pytree.tree_map_only(Tensor, _round_to_tf32, inner_args)
        with self._own_random_state(operation):
            result = operation(*inner_args, **inner_kwargs)
        if is_download:
            return result
        known = {id(t.inner): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, EmulatedTensor)}
        return pytree.tree_map_only(Tensor, lambda t: known[id(t)] if id(t) in known else EmulatedTensor(t), result)

    def _check(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise if a real device would, and count the CPU tensors that it copies.

        Raises:
            RuntimeError: Tensors of two devices are mixed, or the generator belongs to the CPU.
            TypeError: The device has no float64.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) and leaf.device.type != NAME for leaf in leaves):
            raise RuntimeError(f"{operation}: expected a generator of {NAME!r}, found one of the CPU")
        if torch.float64 in _list_dtypes(leaves) and not self.has_float64:
            raise TypeError(f"{operation}: the device has no float64")
        if operation in MOVING:
            return
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, EmulatedTensor) and leaf.dim() > 0:
                if operation not in INDEXING:
                    raise RuntimeError(f"{operation}: expected all tensors on one device, found one on {leaf.device}")
                self.note("uploads")

    def _is_rounded(self, operation: Any) -> bool:
        is_product = operation.overloadpacket.__name__ in PRODUCTS
        return self.rounds_products and is_product and torch.backends.cuda.matmul.fp32_precision == "tf32"

    @contextmanager
    def _own_random_state(self, operation: Any) -> Iterator[None]:
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            yield
            return
        host_state = torch.random.get_rng_state()
        torch.random.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.random.get_rng_state()
            torch.random.set_rng_state(host_state)


EMULATOR = Emulator()
_library = torch.library.Library("_", "IMPL")
_aten_library = torch.library.Library("aten", "IMPL")


class EmulatedTensor(Tensor):
    """A tensor of the emulated device.

    Attributes:
        inner: CPU tensor that holds the values.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> EmulatedTensor:
        made: EmulatedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EmulatedTensor({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        EMULATOR.note("synchronizations")
        return self.inner.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MOVING:
            return _copy(func, *args)
        return EMULATOR.run(func, args, kwargs)


def _copy(operation: Any, targets: Any, sources: Any, *_: Any) -> Any:
    """Return the target of a copy between any devices."""
    for target, source in zip(pytree.tree_leaves(targets), pytree.tree_leaves(sources), strict=True):
        is_target, is_source = isinstance(target, EmulatedTensor), isinstance(source, EmulatedTensor)
        EMULATOR.note("kernels" if is_target and is_source else "uploads" if is_target else "synchronizations")
        if is_target:
            EMULATOR._check(aten.clone.default, [target], {})
        (target.inner if is_target else target).copy_(source.inner if is_source else source)
    return None if operation is aten._foreach_copy_.default else targets


def _list_dtypes(values: Any) -> list[torch.dtype]:
    """Return the types of tensors and the requested types."""
    leaves = pytree.tree_leaves(values)
    dtypes = [leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [dtype for dtype in dtypes if isinstance(dtype, torch.dtype)]


def _round_to_tf32(tensor: Tensor) -> Tensor:
    """Return float32 values rounded to 10 bits of mantissa."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).reshape(tensor.shape)


def _find_line() -> str:
    """Return the innermost line outside of torch and of this file."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and "contextlib" not in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a thread of autograd"


def _run_in_lower_precision(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a product, computed as under autocast."""
    dtype = torch.get_autocast_dtype(NAME)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        args = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, args)
        return operation(*args, **kwargs)


def register() -> None:
    """Register the device with torch, once per process."""
    global DEVICE
    if DEVICE.type == NAME:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: setattr(EMULATOR, "random_state", torch.Generator().manual_seed(seed).get_state()),
        get_rng_state=lambda device=0: EMULATOR.random_state.clone(),
        set_rng_state=lambda state, device=0: setattr(EMULATOR, "random_state", state.clone()),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    DEVICE = torch.device(NAME, 0)
    # Operations without a tensor of the device, such as torch.zeros(device=...), are dispatched here.
    _library.fallback(lambda operation, *args, **kwargs: EMULATOR.run(operation, args, kwargs), "PrivateUse1")
    _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # torch.tensor(..., device=...) does not call __torch_dispatch__.
    _aten_library.impl("copy_", lambda target, source, *_: _copy(aten.copy_.default, target, source), "PrivateUse1")
    for name in AUTOCAST:
        _aten_library.impl(name, partial(_run_in_lower_precision, getattr(aten, name)), "AutocastPrivateUse1")
