"""Seeds of a run. Each use of random numbers has its own, so that none depends on how often another was used."""

import hashlib

import torch


def derive_seed(seed: int, use: str, *position: int) -> int:
    """Return the seed of one use at one position (task, epoch, ...), derived from the run's seed."""
    name = "/".join(map(str, (seed, use, *position)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def make_generator(seed: int, use: str, *position: int) -> torch.Generator:
    """Return a generator with the seed of `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, use, *position))
