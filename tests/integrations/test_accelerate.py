"""Optimizers that Accelerate has wrapped."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from projection.process_pair import run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp import storage
from sgp.projection import OptimizerHook

accelerate = pytest.importorskip("accelerate", reason="of the extra 'accelerate'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*can hardly learn"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]


def make_loader(task: int) -> TensorDataset:
    """Return inputs in five of 16 directions, which differ between tasks."""
    generator = torch.Generator().manual_seed(task)
    x = torch.randn(24, 5, generator=generator) @ torch.randn(5, 16, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 2))


def compute_outputs(model: nn.Module, task: int) -> Tensor:
    with torch.no_grad():
        return model(make_loader(task).tensors[0]).clone()


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


def train(accelerator: Any, model: nn.Module, optimizer: Any, schedule: Any, task: int, epochs: int = 2) -> None:
    loader = accelerator.prepare(DataLoader(make_loader(task), batch_size=4))
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def make_setup(**settings: Any) -> tuple[Any, nn.Module, sgp.GradientMemory, Any, Any, OptimizerHook]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    model = make_network()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return accelerator, model, memory, optimizer, schedule, memory.attach(optimizer)


@pytest.fixture(autouse=True)
def reset_accelerate() -> None:
    """Reset Accelerate, whose settings belong to the whole process."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize(("precision", "allowed"), [("no", 1e-4), ("bf16", 0.02)])
def test_outputs_of_the_first_task_do_not_change_while_the_second_is_trained(precision: str, allowed: float) -> None:
    accelerator, model, memory, optimizer, schedule, hook = make_setup(mixed_precision=precision)
    train(accelerator, model, optimizer, schedule, 0)
    memory.update(DataLoader(make_loader(0), batch_size=4))
    old, new = compute_outputs(model, 0), compute_outputs(model, 1)
    train(accelerator, model, optimizer, schedule, 1)
    assert hook.steps == 12
    assert measure_drift(compute_outputs(model, 0), old) < allowed
    assert measure_drift(compute_outputs(model, 1), new) > 0.05
    hook.detach()
    train(accelerator, model, optimizer, schedule, 1)
    assert measure_drift(compute_outputs(model, 0), old) > 0.05


def test_the_hook_belongs_to_the_inner_optimizer() -> None:
    *_, memory, optimizer, _, hook = make_setup()
    assert hook.is_of(optimizer.optimizer)
    again = memory.attach(optimizer.optimizer)  # the optimizer is not attached twice
    assert not hook.is_attached
    assert again.is_of(optimizer.optimizer)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, whose own step also changes weights."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)


def test_an_optimizer_around_another_one_is_projected_as_a_whole() -> None:
    model = nn.Linear(4, 2)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([torch.ones(1, 4)])
    outer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    assert memory.attach(outer).is_of(outer)
    before = model(torch.ones(1, 4)).detach()
    model(torch.randn(3, 4)).sum().backward()
    outer.step()
    torch.testing.assert_close(model(torch.ones(1, 4)).detach(), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_a_scaler_skips_changes_nothing(optimizer: Any) -> None:
    accelerate.Accelerator(cpu=True)
    model = make_network()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_loader(0).tensors[0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer(model.parameters(), lr=0.05), scaler=scaler)
    hook = memory.attach(wrapped)
    old, x = compute_outputs(model, 0), make_loader(1).tensors[0]
    for step, factor in enumerate([1.0, math.inf, 1.0]):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler.scale(model(x).square().mean() * factor).backward()
        wrapped.step()
        assert wrapped.step_was_skipped == (factor == math.inf)
        unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert unchanged == wrapped.step_was_skipped, step
        wrapped.zero_grad()
    assert hook.steps == 2
    assert measure_drift(compute_outputs(model, 0), old) < 1e-4


def test_memory_and_hook_are_part_of_a_checkpoint_if_registered(tmp_path: Path) -> None:
    accelerator, model, memory, optimizer, schedule, hook = make_setup()
    accelerator.register_for_checkpointing(memory, hook)
    train(accelerator, model, optimizer, schedule, 0)
    memory.update(DataLoader(make_loader(0), batch_size=4))
    train(accelerator, model, optimizer, schedule, 1, epochs=1)
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, schedule, 1)
    memory.update(DataLoader(make_loader(1), batch_size=4))

    accelerator, fresh, again, optimizer, schedule, hook = make_setup()
    accelerator.register_for_checkpointing(again, hook)
    accelerator.load_state(str(tmp_path / "state"))
    assert again.tasks == 1
    assert hook.steps == 9
    train(accelerator, fresh, optimizer, schedule, 1)
    again.update(DataLoader(make_loader(1), batch_size=4))
    for (name, value), other in zip(model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert storage.digest(memory.state_dict()) == storage.digest(again.state_dict())


def run_one_of_two(out: Path, precision: str) -> None:
    """Learn two tasks as one of two processes, interrupted and resumed in the second; write what was found."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    accelerator, model, memory, optimizer, schedule, hook = make_setup(mixed_precision=precision)
    accelerator.register_for_checkpointing(memory, hook)
    inner = accelerator.unwrap_model(model)
    dtypes: list[torch.dtype] = []

    def update() -> None:
        memory.update(accelerator.prepare(DataLoader(make_loader(task), batch_size=4)))

    task = 0
    train(accelerator, model, optimizer, schedule, task)
    update()
    old, new = compute_outputs(inner, 0), compute_outputs(inner, 1)
    task = 1
    train(accelerator, model, optimizer, schedule, task, epochs=1)
    accelerator.save_state(str(out / "state"))
    ends = []
    for resumed in (False, True):
        if resumed:
            accelerator.load_state(str(out / "state"))
        train(accelerator, model, optimizer, schedule, task)
        drift = [measure_drift(compute_outputs(inner, 0), old), measure_drift(compute_outputs(inner, 1), new)]
        update()
        digests = [storage.digest(inner.state_dict()), storage.digest(memory.state_dict())]
        ends.append({"drift": drift, "digests": digests, "tasks": memory.tasks, "steps": hook.steps})
    hook.detach()
    inner[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    train(accelerator, model, optimizer, schedule, task)
    found = {
        "processes": accelerator.num_processes,
        "dtype": str(dtypes[-1]),
        "ends": ends,
        "unprotected": measure_drift(compute_outputs(inner, 0), old),
    }
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype", "allowed"), [("no", "torch.float32", 1e-4), ("bf16", "torch.bfloat16", 0.02)]
)
def test_two_processes_train_resume_and_update_together(
    precision: str, dtype: str, allowed: float, tmp_path: Path
) -> None:
    first, second = run_processes(__file__, tmp_path, precision)
    assert first == second  # outputs, weights and memory to the bit
    assert first["processes"] == 2
    assert first["dtype"] == dtype
    whole, resumed = first["ends"]
    assert whole == resumed
    assert whole["tasks"] == 2
    old, new = whole["drift"]
    assert old < allowed
    assert new > 0.05
    assert first["unprotected"] > 0.05


if __name__ == "__main__":
    run_one_of_two(Path(sys.argv[1]), sys.argv[2])
