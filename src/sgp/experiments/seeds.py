"""Random numbers of a run: each use has its own seed, so that none depends on how often another was used."""

import hashlib

import torch


def seed_for(seed: int, use: str, *position: int) -> int:
    """A seed for one use at one position (task, epoch, ...), from the run's own."""
    name = "/".join(map(str, (seed, use, *position)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, use: str, *position: int) -> torch.Generator:
    """A generator of `seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, use, *position))
