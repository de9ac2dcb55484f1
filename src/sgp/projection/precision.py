"""Full precision where a result depends on it: autocast and TF32 change what a product computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_reduced_precision(device: torch.device) -> bool:
    """Return whether float32 products on a device are computed with fewer bits just now."""
    return torch.is_autocast_enabled(device.type) or torch.get_float32_matmul_precision() != "highest"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products on a device in float32 inside the block, whatever the user's settings are."""
    if not is_reduced_precision(device):
        yield
        return
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
