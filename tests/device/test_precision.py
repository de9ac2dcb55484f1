"""Autocast and TF32 change the outputs of the model, but not the computations of the memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from device.emulated import Emulator
from device.networks import (
    CASES,
    IMAGES,
    LIMIT,
    Case,
    assert_protected,
    compute_gradient,
    copy_weights,
    make_adam,
    make_memory,
    make_sgd,
    train,
)
from torch import nn
from torch.optim import Optimizer

import sgp
from sgp.projection import sketch
from sgp.projection.precision import full_precision, is_reduced_precision
from sgp.projection.subspace import Subspace
from sgp.projection.update import GramChoice

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked"),
]

# The two ways to reduce the precision of products in PyTorch.
TF32: dict[str, Callable[[], Any]] = {
    "for all backends": lambda: torch.set_float32_matmul_precision("high"),
    "by backend": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
}
OPTIMIZERS = {"SGD": make_sgd, "Adam": make_adam}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@contextmanager
def autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, dtype=torch.bfloat16):
        yield


@contextmanager
def tf32(how: str) -> Iterator[None]:
    """Compute products in TF32."""
    if how == "by backend" and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch has these settings since 2.9")
    TF32[how]()
    try:
        yield
    finally:
        if how == "by backend":
            torch.backends.cuda.matmul.fp32_precision = "none"
        else:
            torch.set_float32_matmul_precision("highest")


REDUCED: dict[str, Callable[[torch.device], Any]] = {
    "autocast": autocast,
    "TF32": lambda device: tf32("for all backends"),
    "TF32 by backend": lambda device: tf32("by backend"),
}


@pytest.fixture(params=REDUCED)
def reduced(request: pytest.FixtureRequest, device: torch.device) -> Callable[[], Any]:
    """Return a context with products of fewer bits; on the emulated device, TF32 products are rounded."""
    if device.type == "emulated":
        request.getfixturevalue("emulator").rounds_products = True
    return lambda: REDUCED[request.param](device)


def test_the_emulated_device_rounds_products_to_tf32(emulator: Emulator, device: torch.device) -> None:
    emulator.rounds_products = True
    x = torch.full((1, 1), 1 + 2.0**-12, device=device)
    assert (x @ x).item() > 1
    with tf32("for all backends"):
        assert (x @ x).item() == 1
        with full_precision(device):
            assert (x @ x).item() > 1
        assert (x @ x).item() == 1


def test_an_update_finds_the_bases_of_full_precision(
    case: Case, reduced: Callable[[], Any], device: torch.device
) -> None:
    model = case.build().to(device)
    found, wanted = make_memory(model), make_memory(model)
    wanted.update([case.old_batch])
    with reduced():
        found.update([case.old_batch])
    for name, subspace in wanted.subspaces.items():
        assert torch.equal(found.subspaces[name].rank.cpu(), subspace.rank.cpu()), name
        torch.testing.assert_close(found.subspaces[name].importance, subspace.importance)


@pytest.mark.parametrize("how", OPTIMIZERS)
@pytest.mark.parametrize("where", ["around the step", "around forward and step"])
def test_steps_do_not_leak(where: str, how: str, case: Case, reduced: Callable[[], Any], device: torch.device) -> None:
    model = case.build().to(device)
    memory = make_memory(model)
    optimizer = OPTIMIZERS[how](model)
    memory.attach(optimizer)
    memory.update([case.old_batch])
    before = copy_weights(model)
    for step in range(1, 13):
        with reduced() if where == "around forward and step" else nullcontext():
            compute_gradient(case, model, optimizer, device, step)
        with reduced():
            optimizer.step()
    assert_protected(memory, case, before)


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_momentum_from_before_an_update_is_projected_in_full(
    how: str, reduced: Callable[[], Any], device: torch.device
) -> None:
    model = IMAGES.build().to(device)
    memory = make_memory(model)
    optimizer = OPTIMIZERS[how](model)
    memory.attach(optimizer)
    train(IMAGES, model, optimizer, device)
    before = copy_weights(model)
    with reduced():
        memory.update([IMAGES.old_batch])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # momentum alone
    assert memory.check(IMAGES.old_batch, reference=before).leak < LIMIT


def test_a_check_reports_the_drift_of_full_precision(
    case: Case, reduced: Callable[[], Any], device: torch.device
) -> None:
    model = case.build().to(device)
    memory = make_memory(model)
    memory.update([case.old_batch])
    optimizer = make_adam(model)  # not attached
    train(case, model, optimizer, device, steps=2)
    model.eval()
    wanted = memory.check(case.old_batch)
    assert wanted.drift > 0.01
    with reduced():
        model(case.old_batch.to(device))  # autocast caches the weights that it has cast
        found = memory.check(case.old_batch)
    assert found == wanted


def test_a_check_sees_the_drift_of_a_forward_pass_that_casts_weights(device: torch.device) -> None:
    model = IMAGES.build().to(device).eval()
    memory = make_memory(model)
    memory.update([IMAGES.old_batch])
    train(IMAGES, model, make_adam(model), device, steps=2)  # not attached
    model.eval()

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with autocast(device):
            out: torch.Tensor = model(batch)
        return out

    wanted = memory.check(IMAGES.old_batch, forward=forward).drift
    with autocast(device):
        model(IMAGES.old_batch.to(device))  # the cast weights are cached until the block ends
        assert memory.check(IMAGES.old_batch, forward=forward).drift == wanted > 0.01


def test_a_change_is_projected_in_full(reduced: Callable[[], Any], device: torch.device) -> None:
    model = IMAGES.build().to(device)
    memory = make_memory(model)
    memory.update([IMAGES.old_batch])
    change, bias = torch.randn(40, 72, device=device), torch.randn(40, device=device)
    wanted = memory.project(change, "first", bias)
    with reduced():
        found = memory.project(change, "first", bias)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_pending_change_is_projected_in_full(reduced: Callable[[], Any], device: torch.device) -> None:
    model = IMAGES.build().to(device)
    memory, optimizer = make_memory(model), make_adam(model)
    hook = memory.attach(optimizer, every=100)
    memory.update([IMAGES.old_batch])
    before = copy_weights(model)
    train(IMAGES, model, optimizer, device)
    with reduced(), hook.projected():
        inside = copy_weights(model)
    with reduced():
        hook.flush()
    for name, value in model.state_dict().items():
        assert torch.equal(inside[name], value), name
    assert_protected(memory, IMAGES, before)


def make_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 4))


def step_wide(model: nn.Module, optimizer: Optimizer, device: torch.device, seed: int) -> None:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed), device="cpu")
    optimizer.zero_grad()
    model(x.to(device)).square().sum().backward()
    optimizer.step()


def test_inputs_are_projected_in_full_precision_only(reduced: Callable[[], Any], device: torch.device) -> None:
    modes = []
    for context in (nullcontext, reduced):
        model = make_wide().to(device)
        memory = make_memory(model, exclude=["1"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        hook = memory.attach(optimizer, mode="input")
        memory.update([torch.ones(3, 40)])
        before = copy_weights(model)
        with context():
            for seed in range(4):
                step_wide(model, optimizer, device, seed)
        modes.append(hook.modes)
        result = memory.check(torch.ones(3, 40), reference=before)
        assert result.leak < LIMIT
    assert modes == [{"0": "input"}, {"0": "gradient"}]


def test_the_input_mode_ends_when_precision_is_reduced(reduced: Callable[[], Any], device: torch.device) -> None:
    model = make_wide().to(device)
    memory = make_memory(model, exclude=["1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = memory.attach(optimizer, mode="input")
    memory.update([torch.ones(3, 40)])
    before = copy_weights(model)
    step_wide(model, optimizer, device, 1)
    step_wide(model, optimizer, device, 2)
    assert hook.modes == {"0": "input"}
    with reduced():
        step_wide(model, optimizer, device, 3)
        assert hook.modes == {"0": "gradient"}
    assert memory.check(torch.ones(3, 40), reference=before).leak < LIMIT


SETTINGS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "legacy": lambda: torch.set_float32_matmul_precision("medium"),
    "legacy, CUDA alone": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "CUDA's products": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "CPU's products": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "a whole backend": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
}


def read_settings() -> list[str]:
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn, backends.mkldnn, backends)
    return [setting.fp32_precision for setting in settings]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has these settings since 2.9")
@pytest.mark.parametrize("name", SETTINGS)
def test_full_precision_restores_the_users_settings(name: str) -> None:
    backends: Any = torch.backends
    cpu, before = torch.device("cpu"), read_settings()
    backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"
    SETTINGS[name]()
    try:
        wanted = read_settings()
        assert is_reduced_precision(cpu) == (name != "none")
        with full_precision(cpu):
            assert not is_reduced_precision(cpu)
        assert read_settings() == wanted
        if name == "a whole backend":  # its products go on following it
            backends.cudnn.fp32_precision = "ieee"
            assert backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        settings = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn, backends.mkldnn)
        for setting, value in zip(settings, before, strict=False):
            setting.fp32_precision = value


@pytest.mark.parametrize("gram", ["float32", "sketch"])
def test_the_inputs_of_a_wide_layer_are_collected_in_float32(
    gram: GramChoice, device: torch.device, reduced: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch, "LEAST_BUFFER", 32)
    monkeypatch.setattr(sketch, "ROWS_PER_PRODUCT", 32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 256, generator=generator) / torch.arange(1, 257) ** 1.5
    model = nn.Linear(256, 4).to(device)
    memory = sgp.GradientMemory(model, threshold=0.99, gram=gram)
    with reduced():
        (layer,) = memory.update(list(torch.split(rows, 100))).layers
    assert layer.path == gram
    subspace = memory.subspaces["(model)"]
    assert isinstance(subspace, Subspace)
    basis, joint = subspace.basis[0].cpu().double(), torch.cat([rows, torch.ones(600, 1)], dim=1).double()
    captured = float((joint @ basis).square().sum() / joint.square().sum())
    assert layer.captured is not None
    assert 0.99 <= layer.captured <= captured
