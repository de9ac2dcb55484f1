"""Full precision where a result depends on it: autocast and TF32 change what a product computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def is_reduced_precision(device: torch.device) -> bool:
    """Return whether float32 products on a device are computed with fewer bits just now."""
    is_autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return is_autocast or torch.get_float32_matmul_precision() != "highest"


def _disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Compute float32 products on a device in float32 inside the block, whatever the user's settings are."""
    return _raise_precision(device) if is_reduced_precision(device) else nullcontext()


@contextmanager
def _raise_precision(device: torch.device) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with _disable_autocast(device):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
