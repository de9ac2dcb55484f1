"""A memory on a device: every mode, saving and loading, and arguments on another device."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device.networks import (
    CASES,
    IMAGES,
    LIMIT,
    TEXTS,
    Case,
    assert_protected,
    copy_to,
    copy_weights,
    make_adam,
    make_memory,
    make_sgd,
    prepare_batch,
    train,
)
from torch import Tensor, nn
from torch.optim import Optimizer

import sgp

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:the model has 16-bit weights"),
    pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked"),
]

Pair = namedtuple("Pair", "input label")

MODES: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any]]] = {
    "SGD-auto": (make_sgd, {}),
    "SGD-step": (make_sgd, {"mode": "step"}),
    "SGD-gradient": (make_sgd, {"mode": "gradient"}),
    "SGD-input": (make_sgd, {"mode": "input"}),
    "Adam-auto": (make_adam, {}),
    "Adam-every-4": (make_adam, {"every": 4}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("how", MODES)
def test_every_mode_protects_on_the_device(case: Case, how: str, device: torch.device) -> None:
    build, options = MODES[how]
    model = case.build().to(device)
    memory = make_memory(model)
    optimizer = build(model)
    hook = memory.attach(optimizer, **options)
    train(case, model, optimizer, device)
    memory.update([case.old_batch.to(device)])
    before = copy_weights(model)
    train(case, model, optimizer, device)
    assert_protected(memory, case, before)
    if "mode" in options:
        wanted = {options["mode"]} | ({"gradient"} if how == "SGD-input" else set())
        assert set(hook.modes.values()) == wanted
    memory.update([case.make_batch(1).to(device)])
    before = copy_weights(model)
    train(case, model, optimizer, device, steps=4)
    # Most layers are full now: they change by rounding, of which a share may leak.
    assert max(layer.drift for layer in memory.check(case.make_batch(1), reference=before).layers) < LIMIT


@pytest.mark.parametrize("how", MODES)
def test_training_on_the_device_equals_training_on_the_cpu(case: Case, how: str, device: torch.device) -> None:
    build, options = MODES[how]
    original = case.build()
    trained = []
    for place in (torch.device("cpu"), device):
        model = copy_to(original, place)
        memory, optimizer = make_memory(model), build(model)
        memory.attach(optimizer, **options)
        memory.update([case.old_batch])
        train(case, model, optimizer, place)
        # The weights may differ: Adam takes steps along rounding in zero gradients, such as the one of a bias of keys.
        trained.append(model.eval()(case.make_batch(1).to(place)).cpu())
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("build", [make_sgd, make_adam])
def test_16_bit_weights_are_protected_on_the_device(build: Any, case: Case, device: torch.device) -> None:
    model = case.build().bfloat16().to(device)
    memory, optimizer = make_memory(model), build(model)
    hook = memory.attach(optimizer)
    memory.update([prepare_batch(case.old_batch, model)])
    train(case, model, optimizer, device)
    layers = memory.layers.values()
    masters = hook.state_dict()["masters"]
    assert set(masters) == {parameter.name for layer in layers for parameter in layer.parameters}
    assert {master.device for master in masters.values()} == {device}
    # The rounding of the weights leaks, and the masters' change does not.
    for layer in layers:
        change = masters[layer.weight.name] - memory.anchor[layer.weight.name].float()
        bias = None if layer.bias is None else masters[layer.bias.name] - memory.anchor[layer.bias.name].float()
        assert change.norm() > 0
        assert layer.compute_blocked_share(change, bias) < 1e-3, layer.name


class Encoding(UserDict[str, Tensor]):
    """A batch with a method ``to``, as in transformers."""

    def to(self, device: torch.device) -> "Encoding":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


BATCHES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, torch.zeros(len(x))),
    "list": lambda x: [x, torch.zeros(len(x))],
    "named tuple": lambda x: Pair(x, "label"),
    "dict": lambda x: {"tokens": x},
    "encoding": lambda x: Encoding(tokens=x),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_on_the_cpu_are_moved_to_the_models_device(kind: str, device: torch.device) -> None:
    model = TEXTS.build().to(device)
    given, wanted = make_memory(model), make_memory(model)
    batch = BATCHES[kind](TEXTS.old_batch)
    given.update([batch])
    wanted.update([TEXTS.old_batch.to(device)])
    for name, subspace in wanted.subspaces.items():
        torch.testing.assert_close(given.subspaces[name].importance, subspace.importance)
        assert given.subspaces[name].importance.device == device
    assert given.check(batch).drift == 0
    assert given.plan(8, batch).layers
    if isinstance(batch, Encoding):
        assert batch["tokens"].device.type == "cpu"  # the loader's batch is not moved


def test_a_forward_and_a_mask_see_batches_on_the_models_device(device: torch.device) -> None:
    model = TEXTS.build().to(device)
    memory = make_memory(model)
    seen: list[torch.device] = []

    def forward(batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch[0].device)
        out: Tensor = model(batch[0])
        return out

    def mask(batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch[1].device)
        return batch[1]

    memory.update([(TEXTS.old_batch, TEXTS.old_batch > 2)], forward=forward, mask=mask)
    assert set(seen) == {device}


def test_bases_follow_a_model_that_moves(case: Case, device: torch.device) -> None:
    model = case.build()
    memory = make_memory(model)
    memory.update([case.old_batch])
    model.to(device)
    optimizer = make_adam(model)
    memory.attach(optimizer)
    before = copy_weights(model)
    train(case, model, optimizer, device)
    assert_protected(memory, case, before)
    assert {subspace.importance.device for subspace in memory.subspaces.values()} == {device}
    model.cpu()
    assert memory.check(case.old_batch, reference={n: t.cpu() for n, t in before.items()}).leak < LIMIT
    assert {subspace.importance.device.type for subspace in memory.subspaces.values()} == {"cpu"}
    memory.update([case.make_batch(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pending_change_follows_a_model_that_moves(dtype: torch.dtype, case: Case, device: torch.device) -> None:
    model = case.build().to(dtype)
    memory, optimizer = make_memory(model), make_adam(model)
    hook = memory.attach(optimizer, every=4)
    memory.update([prepare_batch(case.old_batch, model)])
    before = copy_weights(model)
    train(case, model, optimizer, torch.device("cpu"), steps=2)
    model.to(device)
    if device.type == "cpu":
        model.double()
    hook.flush()
    reference = {name: value.to(model.state_dict()[name].dtype) for name, value in before.items()}
    limit = LIMIT if dtype == torch.float32 else 0.05  # the weights are rounded to 16 bits
    assert memory.check(prepare_batch(case.old_batch, model), reference=reference).leak < limit
    assert not torch.equal(next(model.parameters()).cpu(), reference[next(iter(reference))])


@pytest.mark.parametrize("store", ["float32", "int8"])
def test_a_saved_memory_continues_on_the_device(store: Any, case: Case, device: torch.device, tmp_path: Path) -> None:
    model = case.build().to(device)
    memory = make_memory(model, store=store)
    memory.update([case.old_batch])
    memory.save(tmp_path / "memory.safetensors")
    before = copy_weights(model)
    after = []
    for restored in (memory, sgp.GradientMemory.from_file(model, tmp_path / "memory.safetensors")):
        model.load_state_dict(before)
        optimizer = make_adam(model)
        hook = restored.attach(optimizer)
        train(case, model, optimizer, device)
        assert {subspace.importance.device for subspace in restored.subspaces.values()} == {device}
        after.append(model(case.make_batch(1).to(device)).detach())
        hook.detach()
    # On some devices a backward pass does not give the same bits twice.
    torch.testing.assert_close(after[1], after[0], rtol=1e-3, atol=1e-3)


def test_a_reference_on_the_cpu_gives_the_same_check(case: Case, device: torch.device) -> None:
    model = case.build().to(device)
    memory = make_memory(model)
    memory.update([case.old_batch])
    reference = copy_weights(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = memory.check(case.old_batch)
    assert wanted.drift > 0.01
    assert wanted.leak > 0.01
    assert memory.check(case.old_batch, reference=reference) == wanted


def test_a_change_on_the_cpu_is_projected_and_stays_there(device: torch.device) -> None:
    model = IMAGES.build().to(device)
    memory = make_memory(model)
    memory.update([IMAGES.old_batch])
    change, bias = torch.randn(40, 72), torch.randn(40)
    found = memory.project(change, "first", bias)
    wanted = memory.project(change.to(device), "first", bias.to(device))
    for part, other, given in zip(found, wanted, (change, bias), strict=True):
        assert part.device.type == "cpu"
        assert other.device == device
        torch.testing.assert_close(part, other.cpu())
        assert not torch.allclose(part, given)


@pytest.mark.parametrize("place", ["the device", "the cpu"])
def test_a_default_device_changes_nothing(place: str, case: Case, device: torch.device, tmp_path: Path) -> None:
    where = device if place == "the device" else torch.device("cpu")
    batches = [case.make_batch(seed) for seed in range(2)]
    model = case.build().to(where)
    torch.set_default_device(device)
    memory, optimizer = make_memory(model), make_sgd(model)
    memory.attach(optimizer, mode="input")
    memory.update(batches[:1])
    before = copy_weights(model)
    with torch.device("cpu"):  # as in a training loop that creates its batches there
        train(case, model, optimizer, where)
    result = memory.check(batches[0], reference=before)
    assert result.leak < LIMIT
    memory.save(tmp_path / "memory.safetensors")
    memory.load(tmp_path / "memory.safetensors")
    assert memory.check(batches[0], reference=before) == result
    memory.update(batches[1:])
    assert {subspace.importance.device for subspace in memory.subspaces.values()} == {where}
    assert memory.plan(8).layers
    assert memory.summary().to_dict()["tasks"] == 2


def test_an_update_leaves_the_devices_random_state_alone(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2)).to(device)
    memory = make_memory(model, exclude=["2"])

    def forward(batch: Tensor) -> Tensor:
        out: Tensor = model(batch + torch.randn(batch.shape, device=batch.device))
        return out

    torch.manual_seed(5)
    wanted = torch.randn(4, device=device)
    torch.manual_seed(5)
    memory.update([torch.ones(3, 6)], forward=forward)
    memory.check(torch.ones(3, 6), forward=forward)
    assert torch.equal(torch.randn(4, device=device), wanted)


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("how", MODES)
def test_a_device_needs_no_float64(case: Case, how: str, device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, device=device).double()
    build, options = MODES[how]
    model = case.build().to(device)
    memory, optimizer = make_memory(model), build(model)
    memory.attach(optimizer, **options)
    memory.update([case.old_batch])  # few rows, which are kept
    before = copy_weights(model)
    train(case, model, optimizer, device)
    assert_protected(memory, case, before)
    memory.update([case.make_batch(seed) for seed in range(1, 12)])  # more rows than dimensions
    assert {subspace.importance.device for subspace in memory.subspaces.values()} == {device}
    memory.save(tmp_path / "memory.safetensors")
    memory.load(tmp_path / "memory.safetensors")
    assert memory.check(case.old_batch).drift == 0
    assert str(memory.summary())
