"""Bases that are stored in fewer bits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sgp
from sgp.projection.gram import InputGram
from sgp.projection.subspace import Subspace

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Largest share of a change inside the space that rounded bases do not remove.
LEFT = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.03}


def make_rows(n: int, seed: int, dimension: int = 40, groups: int = 1) -> InputGram:
    generator = torch.Generator().manual_seed(seed)
    gram = InputGram(groups, dimension, precise=True)
    scale = 0.7 ** torch.arange(dimension)
    gram.add(torch.randn(groups, n, dimension, generator=generator) * scale.roll(seed))
    return gram


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["bfloat16", "int8"]), st.integers(1, 3), st.sampled_from([0.6, 0.9, 0.99]), st.integers(1, 90))
def test_rounding_again_changes_nothing_and_growing_keeps_old_bases_as_they_are(
    store: Any, groups: int, threshold: float, n: int
) -> None:
    space = Subspace.empty(groups, 40)
    for task in range(3):
        grown = space.grow(make_rows(n, task, groups=groups), threshold=threshold, alpha=3.0).compress(store)
        again = grown.compress(store)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in grown.state_dict().items())
        for group in range(groups):
            k = int(space.rank[group])
            assert torch.equal(grown.basis[group, :, :k], space.basis[group, :, :k].to(grown.basis.dtype))
        space = grown


@pytest.mark.parametrize("store", ["bfloat16", "int8"])
def test_ranks_and_importances_are_nearly_those_of_full_precision(store: Any) -> None:
    full = small = Subspace.empty(1, 40)
    for task in range(4):
        full = full.grow(make_rows(200, task), threshold=0.95, alpha=3.0)
        small = small.grow(make_rows(200, task), threshold=0.95, alpha=3.0).compress(store)
    assert abs(int(full.rank) - int(small.rank)) <= 1
    k = min(full.width, small.width)
    torch.testing.assert_close(full.importance[:, : k - 1], small.importance[:, : k - 1], atol=0.05, rtol=0)


def train_memory(store: Any, **options: Any) -> tuple[sgp.GradientMemory, Tensor, Tensor]:
    """Return a memory after training on another task, and the old outputs before and after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))
    data = [torch.randn(50, 6) @ torch.randn(6, 30) for _ in range(2)]
    memory = sgp.GradientMemory(model, threshold=0.999, alpha=math.inf, store=store, **options)
    memory.update([data[0]])
    before = model(data[0]).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    for _ in range(50):
        optimizer.zero_grad()
        (model(data[1]) - 1).square().mean().backward()
        optimizer.step()
    return memory, before, model(data[0]).detach()


@pytest.mark.parametrize("store", ["float32", "bfloat16", "int8"])
def test_fewer_bits_take_fewer_bytes_and_leak_a_little(store: Any) -> None:
    memory, before, after = train_memory(store)
    bases = memory.subspaces["0"]
    assert isinstance(bases, Subspace)
    assert bases.basis.element_size() == BYTES[store]
    change = memory.model.get_parameter("0.weight").detach() - memory._anchor["0.weight"]  # type: ignore[index]
    bias = memory.model.get_parameter("0.bias").detach() - memory._anchor["0.bias"]  # type: ignore[index]
    left = bases.compute_blocked_coefficients(change.unsqueeze(0), bias.unsqueeze(0)).norm() / change.norm()
    assert left < LEFT[store]
    if store != "float32":
        assert left > LEFT["float32"]
    assert float((after - before).norm() / before.norm()) < 0.2


@pytest.mark.parametrize("store", ["float32", "bfloat16", "int8"])
def test_the_memory_equals_its_file_to_the_bit(store: Any, tmp_path: Path) -> None:
    memory, _, _ = train_memory(store)
    memory.save(tmp_path / "memory.safetensors")
    again = sgp.GradientMemory(memory.model, threshold=0.999, alpha=math.inf, store=store)
    again.load(tmp_path / "memory.safetensors")
    change = torch.randn(4, 20)
    for name, bases in memory.subspaces.items():
        loaded = again.subspaces[name].state_dict()
        assert all(torch.equal(value, loaded[key]) for key, value in bases.state_dict().items())
    mine, theirs = (m.project(change, "2", torch.zeros(4)) for m in (memory, again))
    assert torch.equal(mine[0], theirs[0])


def test_no_full_precision_copy_of_the_bases_is_kept() -> None:
    memory, _, _ = train_memory("int8")
    projectors = [layer.get_projector() for layer in memory.layers.values() for _ in range(2)]
    bases = [projector[1] for projector in projectors if projector is not None]
    assert len(set(map(id, bases))) == len(projectors), "bases in full precision are kept between steps"
    assert 3 * memory.capacity().bytes < train_memory("float32")[0].capacity().bytes


def test_an_unknown_store_is_refused_and_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'float32', 'bfloat16', 'int8'; got 'int4'"):
        sgp.GradientMemory(nn.Linear(2, 2), threshold=0.9, store="int4")  # type: ignore[arg-type]
