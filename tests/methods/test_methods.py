"""Interface of all methods, and the basic effects of finetuning, GPM and SGP."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import METHODS, Batch, Method
from sgp.methods.finetune import Finetune
from sgp.methods.gpm import GPM, GPMSettings
from sgp.methods.method import NoSettings
from sgp.methods.sgp import SGP
from sgp.networks import MLP
from sgp.settings import find_options

OURS = ("finetune", "gpm", "sgp")
WIDTHS = (12, 16, 8)


def make_network() -> MLP:
    torch.manual_seed(0)
    return MLP(WIDTHS, (3, 3))


def make_batches(task: int) -> list[Batch]:
    """Return batches whose inputs lie in a few directions of the task's own, so that there is something to protect."""
    generator = torch.Generator().manual_seed(task)
    inputs = torch.randn(60, 3, generator=generator) @ torch.randn(3, WIDTHS[0], generator=generator)
    labels = torch.randint(3, (60,), generator=generator)
    return list(zip(inputs.split(20), labels.split(20), strict=True))


def train(method: Method[Any], task: int) -> None:
    """Take a few steps as any training loop would."""
    optimizer = torch.optim.SGD(method.network.parameters(), lr=0.1)
    method.attach(optimizer)
    for inputs, labels in make_batches(task) * 3:
        optimizer.zero_grad()
        F.cross_entropy(method.network(inputs, task), labels).backward()
        optimizer.step()


def consolidate(method: Method[Any], task: int) -> None:
    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.network(batch[0], task), batch[1], reduction="none")

    method.consolidate(make_batches(task), log_likelihood)


def make_method(name: str, exclude: Sequence[str] = ("heads.*",), **settings: Any) -> Method[Any]:
    kind = METHODS[name]
    return kind(make_network(), kind.Settings(**settings), exclude=exclude)


def copy_layers(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each protected layer's weight with its bias as one more column."""
    return {
        name: torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], dim=1)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith("hidden")
    }


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_registered_under_its_name_and_says_what_it_does(name: str) -> None:
    kind = METHODS[name]
    assert kind.name == name
    assert kind.description
    assert dataclasses.is_dataclass(kind.Settings)
    assert kind.Settings.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(METHODS))
def test_every_setting_declares_what_it_accepts(name: str) -> None:
    kind = METHODS[name].Settings
    hints = get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        if not {bool, str} & set(find_options(hints[entry.name])):
            with pytest.raises(ValueError, match=f"{entry.name} must be"):
                kind(**{entry.name: math.nan})


@pytest.mark.parametrize("name", OURS)
def test_inference_uses_the_network_alone(name: str) -> None:
    assert make_method(name).compute_capacity() == 100


def test_finetuning_is_plain_sgd_and_keeps_nothing() -> None:
    method, plain = make_method("finetune"), Finetune(make_network(), NoSettings())
    train(method, 0)
    optimizer = torch.optim.SGD(plain.network.parameters(), lr=0.1)
    for inputs, labels in make_batches(0) * 3:
        optimizer.zero_grad()
        F.cross_entropy(plain.network(inputs, 0), labels).backward()
        optimizer.step()
    for key, value in plain.network.state_dict().items():
        assert torch.equal(value, method.network.state_dict()[key]), key
    consolidate(method, 0)
    assert (method.state_dict(), method.count_bytes(), method.measure_free()) == ({}, {}, {})


def test_gpm_blocks_steps_along_its_bases_and_sgp_shrinks_them() -> None:
    shares = {}
    for name, settings in (("finetune", {}), ("gpm", {}), ("sgp", {"alpha": 1.0})):
        method, reference = make_method(name, **settings), make_method("gpm")
        train(method, 0)
        reference.network.load_state_dict(method.network.state_dict())
        consolidate(reference, 0)
        consolidate(method, 0)
        before = copy_layers(method.network)
        train(method, 1)
        assert isinstance(reference, GPM)
        share = []
        for layer, weight in copy_layers(method.network).items():
            basis = reference.memory.subspaces[layer].basis[0]
            share.append(float(((weight - before[layer]) @ basis).norm() / (weight - before[layer]).norm()))
        shares[name] = max(share)
    assert shares["gpm"] < 1e-5
    assert shares["gpm"] < 0.5 * shares["sgp"] < 0.5 * shares["finetune"]


def test_heads_stay_free() -> None:
    method = make_method("gpm", threshold=1.0)
    train(method, 0)
    consolidate(method, 0)
    assert method.measure_free().keys() == {"hidden.0", "hidden.1"}
    assert make_method("gpm", exclude=()).measure_free().keys() == {"hidden.0", "hidden.1", "heads.0", "heads.1"}


def test_sgp_with_infinite_alpha_is_gpm_to_the_bit() -> None:
    gpm, sgp = make_method("gpm"), make_method("sgp", alpha=math.inf)
    for task in (0, 1):
        for method in (gpm, sgp):
            train(method, task)
            consolidate(method, task)
    for key, value in gpm.network.state_dict().items():
        assert torch.equal(value, sgp.network.state_dict()[key]), key
    assert gpm.count_bytes() == sgp.count_bytes()
    assert gpm.measure_free() == sgp.measure_free()


def test_bytes_are_those_of_the_bases_and_one_number_each() -> None:
    gpm, sgp = make_method("gpm"), make_method("sgp")
    for method in (gpm, sgp):
        train(method, 0)
        consolidate(method, 0)
    assert isinstance(gpm, GPM)
    # A bias is one more input that is always 1.
    ranks = {name: space.basis.shape[-1] for name, space in gpm.memory.subspaces.items()}
    bases = 4 * (ranks["hidden.0"] * (12 + 1) + ranks["hidden.1"] * (16 + 1))
    assert gpm.count_bytes() == {"bases": bases}
    assert sgp.count_bytes() == {"bases": bases, "importances": 4 * sum(ranks.values())}


def test_the_free_share_shrinks_with_every_task() -> None:
    method = make_method("gpm")
    shares = [method.measure_free()]
    for task in (0, 1):
        train(method, task)
        consolidate(method, task)
        shares.append(method.measure_free())
    for layer in ("hidden.0", "hidden.1"):
        first, second, third = (share[layer] for share in shares)
        assert 1 == first > second > third > 0


def test_the_threshold_rises_from_task_to_task_and_stops_at_one() -> None:
    method = make_method("gpm", threshold=0.97, threshold_step=0.01)
    assert isinstance(method, GPM)
    threshold: Any = method.memory.threshold
    assert [threshold(task) for task in range(5)] == pytest.approx([0.97, 0.98, 0.99, 1.0, 1.0])
    by_layer = make_method("gpm", threshold={"hidden.0": 0.9, "*": 0.95}, threshold_step=0.02)
    assert isinstance(by_layer, GPM)
    rising: Any = by_layer.memory.threshold
    assert [rising["hidden.0"](task) for task in (0, 2)] == pytest.approx([0.9, 0.94])
    assert [rising["*"](task) for task in (0, 2)] == pytest.approx([0.95, 0.99])


def test_bases_come_from_the_set_number_of_samples() -> None:
    method = make_method("gpm", threshold=1.0, memory_samples={"hidden.0": 2, "*": 5})
    assert method.consolidation_batch == 5
    train(method, 0)
    consolidate(method, 0)
    assert isinstance(method, GPM)
    ranks = {name: space.basis.shape[-1] for name, space in method.memory.subspaces.items()}
    assert ranks["hidden.0"] == 2
    assert 2 < ranks["hidden.1"] <= 5
    assert make_method("gpm", memory_samples=7).consolidation_batch == 7
    assert make_method("finetune").consolidation_batch is None


@pytest.mark.parametrize("name", ["memory_samples", "threshold"])
def test_a_pattern_that_matches_nothing_raises_an_error_before_training(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: the pattern 'conv1' matches no module"):
        make_method("gpm", **{name: {"conv1": 1, "*": 1}})


def test_a_nearly_full_layer_raises_no_warning_in_a_run() -> None:
    method = make_method("gpm", threshold=1.0, memory_samples=60)
    for task in range(4):
        train(method, task % 2)
        consolidate(method, task % 2)  # warnings are errors in these tests
    torch.manual_seed(0)
    full = [(torch.randn(60, WIDTHS[0]), torch.zeros(60, dtype=torch.long))]
    method.consolidate(full, lambda batch: method.network(batch[0], 0)[:, 0])
    assert method.measure_free()["hidden.0"] < 0.05


def test_settings_reach_the_memory() -> None:
    method = make_method(
        "sgp", alpha=3.0, first_rank="one-less", truncation="after", orthogonalise=False, bias="freeze"
    )
    assert isinstance(method, SGP)
    memory = method.memory
    assert (memory.alpha, memory.rules.bias) == (3.0, "freeze")
    numerics = memory.numerics
    assert (numerics.first_rank, numerics.truncation, numerics.orthogonalise) == ("one-less", "after", False)


def test_a_layer_without_a_number_of_samples_is_named() -> None:
    settings = GPMSettings(memory_samples={"0": 5})
    with pytest.raises(ValueError, match=r"no pattern matches the layer '1'"):
        METHODS["gpm"](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), settings)


@pytest.mark.parametrize("name", ["trgp", "fs-dgpm"])
def test_methods_that_compute_with_bases_raise_errors_for_embeddings(name: str) -> None:
    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(TypeError, match=f"'0' is an embedding, whose bases are tokens, and {name} has no form"):
        METHODS[name](network, METHODS[name].Settings())
