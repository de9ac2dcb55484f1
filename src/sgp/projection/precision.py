"""Full precision for results that depend on it, under autocast and TF32 and on devices without float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

FEWER_BITS = ("tf32", "bf16")


def is_reduced_precision(device: torch.device) -> bool:
    """Return whether float32 products on a device are now computed with fewer bits."""
    return _is_autocast(device) or _is_matmul_reduced()


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which float32 products on a device are computed in float32, whatever the settings are."""
    return _raise_precision(device) if is_reduced_precision(device) else nullcontext()


@contextmanager
def _raise_precision(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if _is_autocast(device):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if _is_matmul_reduced():
            stack.callback(_force_full_matmul())
        yield


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device can compute in float64; MPS, for instance, cannot."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError):
        return False
    return True


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no such type."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def _is_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _is_matmul_reduced() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the user has set the precision of single backends
        return any(matmul.fp32_precision in FEWER_BITS for matmul, _ in _list_matmul_settings())


def _force_full_matmul() -> Callable[[], None]:
    """Set the precision of float32 products to float32.

    PyTorch has two interfaces for this and refuses to mix them, so the one that the user has chosen is used.

    Returns:
        A function that restores the user's settings.
    """
    settings = _list_matmul_settings()
    values = [matmul.fp32_precision for matmul, _ in settings]
    precision: str | None = None
    try:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        for matmul, _ in settings:
            matmul.fp32_precision = "ieee"
    return partial(_restore_matmul, precision, values)


def _restore_matmul(precision: str | None, values: list[str]) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    for (matmul, backend), value in zip(_list_matmul_settings(), values, strict=True):
        # A setting that follows the one of its backend must go on following it.
        matmul.fp32_precision = "none" if value == backend.fp32_precision else value


def _list_matmul_settings() -> list[tuple[Any, Any]]:
    """Return the settings of matrix products, each with the settings of its backend; none before PyTorch 2.9."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return []
    return [(backends.cuda.matmul, backends.cudnn), (backends.mkldnn.matmul, backends.mkldnn)]
