"""Batches for tests of methods with replay."""

import torch

from sgp.methods import Batch


def make_batch(seed: int, count: int = 8, classes: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 12, generator=generator), torch.randint(classes, (count,), generator=generator)
