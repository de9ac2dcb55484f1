"""A step neither synchronizes with the device nor copies anything to it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device.emulated import EMULATOR, Counts, Emulator
from device.networks import (
    CASES,
    IMAGES,
    Case,
    compute_gradient,
    make_adam,
    make_memory,
    make_sgd,
    prepare_batch,
    train,
)
from torch import nn

import sgp

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:the model has 16-bit weights"),
    pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked"),
]

PACKAGE = {path.name for path in (Path(sgp.__file__).parent / "projection").glob("*.py")}
MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD-step": (make_sgd, {"mode": "step"}),
    "SGD-gradient": (make_sgd, {"mode": "gradient"}),
    "Adam": (make_adam, {}),
    "Adam-every-2": (make_adam, {"every": 2}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@contextmanager
def forbid_synchronization(device: torch.device) -> Iterator[None]:
    """Raise if the host synchronizes with the device inside the block."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif device.type == "emulated":
        with EMULATOR.count() as counts:
            yield
        assert counts.synchronizations == {}
    else:
        pytest.skip(f"synchronizations of {device.type} cannot be counted")


def select_package(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of lines of the package."""
    return {line: count for line, count in counts.items() if line.partition(":")[0] in PACKAGE}


def count_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Counts:
    """Return the operations of a forward, a backward and a step on the emulated device."""
    with EMULATOR.count() as counts:
        compute_gradient(case, model, optimizer, device)
        optimizer.step()
    return counts


def test_the_emulated_device_counts_what_is_done_on_it(emulator: Emulator, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with emulator.count() as counts:
        y = x + x  # one kernel
        y[torch.tensor([0, 1])]  # one copy to the device
        y[y > 1]  # a length that depends on the data
        float(y.sum())
        y.cpu()
        y.copy_(torch.ones(3))
        y.tolist()
    assert counts.kernels.total() == 4  # with the selection by numbers, the comparison and the sum
    assert counts.synchronizations.total() == 4
    assert counts.uploads.total() == 2
    with pytest.raises(RuntimeError, match="one device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", MODES)
def test_a_step_does_not_wait_for_the_device(how: str, dtype: torch.dtype, case: Case, device: torch.device) -> None:
    if dtype != torch.float32 and how == "SGD-gradient":
        pytest.skip("16-bit weights are stepped in the step mode")
    build, options = MODES[how]
    model = case.build().to(dtype).to(device)
    memory, optimizer = make_memory(model), build(model)
    memory.attach(optimizer, **options)
    memory.update([prepare_batch(case.old_batch, model)])
    train(case, model, optimizer, device, steps=2)  # the first one prepares what the others use
    compute_gradient(case, model, optimizer, device)
    with forbid_synchronization(device):
        optimizer.step()
        optimizer.step()


def test_the_input_mode_waits_once_in_a_step(emulator: Emulator, device: torch.device) -> None:
    model = IMAGES.build().to(device)
    memory, optimizer = make_memory(model), make_sgd(model)
    hook = memory.attach(optimizer, mode="input")
    memory.update([IMAGES.old_batch])
    train(IMAGES, model, optimizer, device, steps=3)
    counts = count_step(IMAGES, model, optimizer, device)
    assert list(hook.modes.values()).count("input") == 3
    assert select_package(counts.synchronizations) == dict.fromkeys(counts.synchronizations, 1)
    assert counts.synchronizations.total() == 1
    assert select_package(counts.uploads) == {}


@pytest.mark.parametrize("store", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("when", ["loaded", "moved", "updated"])
def test_nothing_is_copied_to_the_device_in_a_step(
    when: str, store: Any, case: Case, emulator: Emulator, device: torch.device, tmp_path: Path
) -> None:
    model = case.build() if when == "moved" else case.build().to(device)
    memory = make_memory(model, store=store)
    memory.update([case.old_batch])
    if when == "moved":
        model.to(device)
    if when == "loaded":
        memory.save(tmp_path / "memory.safetensors")
        memory = sgp.GradientMemory.from_file(model, tmp_path / "memory.safetensors")
    optimizer = make_adam(model)
    memory.attach(optimizer)
    train(case, model, optimizer, device, steps=1)
    counts = count_step(case, model, optimizer, device)
    assert select_package(counts.uploads) == {}
    assert select_package(counts.kernels) != {}


@pytest.mark.parametrize("how", ["SGD-gradient", "Adam"])
def test_more_layers_of_a_stack_take_no_more_products(how: str, emulator: Emulator, device: torch.device) -> None:
    build, options = MODES[how]
    products = []
    for depth in (3, 9):
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth)), nn.Linear(32, 4)).to(device)
        memory, optimizer = make_memory(model, exclude=[str(depth)]), build(model)
        memory.attach(optimizer, **options)
        memory.update([torch.ones(3, 32)])
        model(torch.randn(8, 32).to(device)).square().sum().backward()
        optimizer.step()  # prepares what later steps use
        with emulator.count() as counts:
            optimizer.step()
        products.append(sum(count for line, count in counts.kernels.items() if line.startswith("stack.py")))
    assert products[0] == products[1] > 0
