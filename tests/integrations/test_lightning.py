"""The callback for the Trainer of Lightning."""

import copy
import csv
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp import storage

lightning = pytest.importorskip("lightning.pytorch", reason="of the extra 'lightning'")
from sgp.integrations.lightning import GradientMemoryCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*can hardly learn"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]


def make_loader(task: int) -> DataLoader[Any]:
    """Return inputs in five of 16 directions, which differ between tasks."""
    generator = torch.Generator().manual_seed(task)
    x = torch.randn(24, 5, generator=generator) @ torch.randn(5, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def get_inputs(task: int) -> Tensor:
    return make_loader(task).dataset[:][0]  # type: ignore[index]


class Module(lightning.LightningModule):
    """A small classifier; optionally with manual optimization.

    Without dropout, since Lightning's checkpoints do not hold the random state.
    """

    def __init__(self, optimizer: str = "adamw", manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 2))
        self.kind = optimizer
        self.automatic_optimization = not manual

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:  # one for each layer
            return [torch.optim.AdamW(layer.parameters(), lr=3e-3) for layer in (self.net[0], self.net[2])]
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Validated(Module):
    """A classifier that records the losses of its validations."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.losses.append(float(nn.functional.cross_entropy(self(x), y)))


def make_trainer(callback: Any, folder: Path, *more: Any, module: Any = lightning, **settings: Any) -> Any:
    return module.Trainer(
        callbacks=[*([] if callback is None else [callback]), *more],
        default_root_dir=folder,
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": bool(more),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        },
    )


def compute_outputs(module: nn.Module, task: int) -> Tensor:
    with torch.no_grad():
        return module.eval()(get_inputs(task)).clone()


def fit(module: nn.Module, trainer: Any, task: int, **options: Any) -> None:
    trainer.fit(module.train(), make_loader(task), **options)


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


@pytest.mark.parametrize(
    ("make", "settings", "options", "allowed"),
    [
        pytest.param({}, {}, {}, 1e-4, id="automatic"),
        pytest.param(
            {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}, 1e-4, id="accumulation and clipping"
        ),
        pytest.param({"manual": True}, {}, {}, 1e-4, id="manual, two optimizers"),
        pytest.param({"optimizer": "sgd"}, {}, {}, 1e-4, id="SGD and Lightning's closure"),
        pytest.param({}, {}, {"every": 5}, 1e-4, id="every 5 steps"),
        pytest.param({}, {"precision": "bf16-mixed"}, {}, 0.05, id="bfloat16 autocast"),
    ],
)
def test_outputs_of_the_first_task_do_not_change_while_the_second_is_trained(
    make: Any, settings: Any, options: Any, allowed: float, tmp_path: Path
) -> None:
    module = Module(**make)
    memory = sgp.GradientMemory(module, threshold=1.0 if allowed < 0.01 else 0.999, alpha=math.inf)
    callback = GradientMemoryCallback(memory, **options)
    fit(module, make_trainer(callback, tmp_path, **settings), 0)
    assert memory.tasks == 1
    plain = copy.deepcopy(module)
    old, new = compute_outputs(module, 0), compute_outputs(module, 1)
    fit(module, make_trainer(callback, tmp_path, **settings), 1)
    fit(plain, make_trainer(None, tmp_path, **settings), 1)
    assert memory.tasks == 2
    assert callback.hooks == []
    assert measure_drift(compute_outputs(plain, 0), old) > 0.1
    assert measure_drift(compute_outputs(module, 0), old) < allowed
    assert measure_drift(compute_outputs(module, 1), new) > 0.05


def test_the_callback_also_serves_pytorch_lightning(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Module().net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    module = Other()
    memory = sgp.GradientMemory(module.net, threshold=1.0, alpha=math.inf)
    callback = GradientMemoryCallback(memory)
    fit(module, make_trainer(callback, tmp_path, module=other), 0)
    old = compute_outputs(module.net, 0)
    fit(module, make_trainer(callback, tmp_path, module=other), 1)
    assert memory.tasks == 2
    assert measure_drift(compute_outputs(module.net, 0), old) < 1e-4


def learn_first_task(folder: Path, **options: Any) -> tuple[Module, sgp.GradientMemory, GradientMemoryCallback]:
    module = Module()
    memory = sgp.GradientMemory(module, threshold=0.9, alpha=2.0)
    callback = GradientMemoryCallback(memory, **options)
    fit(module, make_trainer(callback, folder, max_epochs=1), 0)
    return module, memory, callback


def assert_same(a: tuple[nn.Module, sgp.GradientMemory], b: tuple[nn.Module, sgp.GradientMemory]) -> None:
    for (name, value), other in zip(a[0].state_dict().items(), b[0].state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert storage.digest(a[1].state_dict()) == storage.digest(b[1].state_dict())


@pytest.mark.parametrize("options", [{}, {"every": 4}], ids=["plain", "every 4 steps"])
@pytest.mark.parametrize("epochs", [1, 3], ids=["in the middle", "at the end"])
def test_a_training_that_is_resumed_ends_with_the_same_bits(
    options: dict[str, Any], epochs: int, tmp_path: Path
) -> None:
    module, memory, callback = learn_first_task(tmp_path, **options)
    checkpoints = lightning.callbacks.ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_top_k=-1)
    fit(module, make_trainer(callback, tmp_path, checkpoints, max_epochs=3), 1)

    fresh = Module()
    again = sgp.GradientMemory(fresh, threshold=0.9, alpha=2.0)
    callback = GradientMemoryCallback(again, **options)
    elsewhere = lightning.callbacks.ModelCheckpoint(tmp_path / "again", filename="{epoch}", save_top_k=-1)
    resumed = make_trainer(callback, tmp_path, elsewhere, max_epochs=3)
    # A checkpoint contains tensors and plain values only, so it can be read without executing anything.
    fit(fresh, resumed, 1, ckpt_path=tmp_path / "run" / f"epoch={epochs - 1}.ckpt", weights_only=True)
    assert again.tasks == 2
    assert_same((fresh, again), (module, memory))


def test_validations_see_projected_weights_and_change_nothing(tmp_path: Path) -> None:
    found = []
    for settings in ({"limit_val_batches": 0}, {"val_check_interval": 1}):
        module = Validated()
        memory = sgp.GradientMemory(module, threshold=1.0, alpha=math.inf)
        validation = DataLoader(make_loader(0).dataset, batch_size=24)
        fit(
            module,
            make_trainer(GradientMemoryCallback(memory), tmp_path, limit_val_batches=0),
            0,
            val_dataloaders=validation,
        )
        second = make_trainer(GradientMemoryCallback(memory, every=4), tmp_path, max_epochs=1, **settings)
        fit(module, second, 1, val_dataloaders=validation)
        found.append((module, memory))
    assert len(module.losses) == 7  # the first is Lightning's sanity check
    assert module.losses == pytest.approx([module.losses[0]] * 7, rel=1e-4)
    assert_same(*found)


def test_an_update_sees_batches_as_training_does(tmp_path: Path) -> None:
    class Halved(Module):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] / 2, batch[1]

    module = Halved()
    memory = sgp.GradientMemory(module, threshold=0.9)
    seen = []

    def forward(batch: Any) -> Any:
        seen.append(batch[0])
        return module(batch[0])

    fit(
        module,
        make_trainer(GradientMemoryCallback(memory, forward=forward), tmp_path, max_epochs=1, precision="64-true"),
        0,
    )
    assert memory.tasks == 1
    torch.testing.assert_close(torch.cat(seen[1:]), get_inputs(0).double() / 2)  # the first was the trial
    assert torch.equal(seen[0], seen[1])


def test_an_update_of_a_submodule_leaves_no_trace_on_the_rest(tmp_path: Path) -> None:
    class Larger(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

    module = Larger()
    memory = sgp.GradientMemory(module.net, threshold=0.9)
    modes = []

    def forward(batch: Any) -> Any:
        modes.append(module.norm.training)
        return module(batch[0])

    fit(module, make_trainer(GradientMemoryCallback(memory, forward=forward), tmp_path, max_epochs=1), 0)
    assert memory.tasks == 1
    assert set(modes) == {False}
    assert module.norm.num_batches_tracked == 6  # the batches of the training


def test_a_forward_that_does_not_fit_fails_at_the_first_batch(tmp_path: Path) -> None:
    module = Module()
    memory = sgp.GradientMemory(module, threshold=0.9)
    wrong = GradientMemoryCallback(memory, forward=lambda batch: module(batch))  # a list of inputs and labels
    with pytest.raises(TypeError):
        fit(module, make_trainer(wrong, tmp_path), 0)
    assert wrong.hooks[0].steps == 0


def test_a_module_without_a_forward_needs_one_before_training_and_then_uses_it(tmp_path: Path) -> None:
    class WithoutForward(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Module().net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    module = WithoutForward()
    memory = sgp.GradientMemory(module, threshold=0.9)
    start = copy.deepcopy(module.state_dict())
    with pytest.raises(TypeError, match=r"WithoutForward has no forward\(\).*GradientMemoryCallback\(memory, forward="):
        fit(module, make_trainer(GradientMemoryCallback(memory), tmp_path), 0)
    assert all(torch.equal(value, start[name]) for name, value in module.state_dict().items())
    fit(module, make_trainer(GradientMemoryCallback(memory, forward=lambda batch: module.net(batch[0])), tmp_path), 0)
    assert memory.tasks == 1
    fit(
        module, make_trainer(GradientMemoryCallback(memory, update=False), tmp_path), 1
    )  # without an update none is needed
    assert memory.tasks == 1


def test_optimizers_of_another_model_are_refused(tmp_path: Path) -> None:
    memory = sgp.GradientMemory(Module(), threshold=0.9)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        fit(Module(), make_trainer(GradientMemoryCallback(memory), tmp_path), 0)


def test_attaching_to_lightnings_wrapper_attaches_to_the_inner_optimizer() -> None:
    module = nn.Linear(4, 2)
    inner = torch.optim.AdamW(module.parameters(), lr=0.1)
    wrapper = importlib.import_module("lightning.pytorch.core.optimizer").LightningOptimizer(inner)
    memory = sgp.GradientMemory(module, threshold=1.0, alpha=math.inf)
    assert memory.attach(wrapper).is_of(inner)


def read_metrics(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each metric that a CSVLogger wrote."""
    (file,) = folder.rglob("metrics.csv")
    found: dict[str, list[tuple[int, float]]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if value != "" and name != "step":
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def test_the_logger_receives_capacity_leak_and_drift(tmp_path: Path) -> None:
    module = Validated()
    memory = sgp.GradientMemory(module, threshold=0.9, alpha=2.0)
    for task in range(2):
        callback = GradientMemoryCallback(memory, every=4, check=[get_inputs(0)])
        logger = lightning.loggers.CSVLogger(tmp_path, name=f"task-{task}")
        trainer = make_trainer(callback, tmp_path, logger=logger, log_every_n_steps=1)
        fit(module, trainer, task, val_dataloaders=make_loader(0))
    first, second = (read_metrics(tmp_path / f"task-{task}") for task in range(2))
    assert {"sgp/free/net.0", "sgp/free/net.2", "sgp/captured/net.0", "sgp/captured/net.2"} == set(first)
    assert [step for step, _ in first["sgp/free/net.0"]] == [0, 12]
    assert first["sgp/free/net.0"][0][1] == 1
    assert first["sgp/free/net.0"][1][1] == second["sgp/free/net.0"][0][1] > second["sgp/free/net.0"][1][1] > 0
    assert [step for step, _ in second["sgp/leak/net.0"]] == [6, 12, 12]  # after each validation, and at the end
    assert max(value for _, value in second["sgp/leak/net.0"]) < 1e-5
    assert second["sgp/output_drift"][-1][1] == second["sgp/output_drift"][-2][1] > 0


class Heads(Module):
    """A body with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = self.net[:2], nn.ModuleList(nn.Linear(48, 2) for _ in range(2))
        del self.net
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.task](self.body(x))


def compute_first_logits(module: Heads, task: int) -> Tensor:
    with torch.no_grad():
        return module.heads[0](module.body(get_inputs(task)))


def learn_two_heads(folder: Path, *, realign: bool, **options: Any) -> tuple[Heads, sgp.GradientMemory, Tensor]:
    """Return a module that has learned two tasks, and the first head's logits for the second task before it."""
    module = Heads()
    memory = sgp.GradientMemory(module, threshold=0.8, alpha=1.0, exclude=["heads.*"])
    fit(module, make_trainer(GradientMemoryCallback(memory), folder), 0)
    before = compute_first_logits(module, 1)
    module.task = 1
    realigned = {"heads": module.heads[:1], "features": lambda batch: module.body(batch[0])} if realign else {}
    checkpoints = lightning.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    callback = GradientMemoryCallback(memory, **realigned)
    fit(module, make_trainer(callback, folder, checkpoints, max_epochs=4), 1, **options)
    return module, memory, before


@pytest.mark.parametrize("epoch", [1, 3], ids=["in the middle", "at the end"])
def test_heads_of_earlier_tasks_are_realigned_also_after_a_training_is_resumed(epoch: int, tmp_path: Path) -> None:
    plain, _, before = learn_two_heads(tmp_path / "plain", realign=False)
    module, memory, _ = learn_two_heads(tmp_path / "run", realign=True)
    moved = measure_drift(compute_first_logits(plain, 1), before)
    assert moved > 0.05
    assert measure_drift(compute_first_logits(module, 1), before) < moved / 2
    checkpoint = tmp_path / "run" / f"epoch={epoch}.ckpt"
    resumed, again, _ = learn_two_heads(tmp_path / "again", realign=True, ckpt_path=checkpoint, weights_only=True)
    assert_same((resumed, again), (module, memory))


def test_heads_that_the_memory_protects_are_refused_before_training(tmp_path: Path) -> None:
    module = Module()
    memory = sgp.GradientMemory(module, threshold=0.9)
    memory.update([get_inputs(0)])
    callback = GradientMemoryCallback(memory, heads=module.net[2], features=lambda batch: module.net[:2](batch[0]))
    with pytest.raises(ValueError, match=r"'net\.2' is protected"):
        fit(module, make_trainer(callback, tmp_path), 1)
    assert callback.hooks[0].steps == 0
