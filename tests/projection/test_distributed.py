"""Updates of one memory over two processes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projection.process_pair import run_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sgp
from sgp import storage
from sgp.projection import sketch
from sgp.projection.distributed import ProcessGroup
from sgp.projection.gram import InputGram
from sgp.projection.subspace import Subspace

# Few rows for the wide layer and many for the narrow one: both forms of a Gram matrix; and tokens.
SAMPLES = 23


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 6)
        self.wide = nn.Linear(60, 5)
        self.query, self.key = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wide(self.words(tokens).flatten(1)).tanh()
        return self.query(x) * self.key(x)


def make_data(task: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(task)
    return TensorDataset(torch.randint(0, 20 + task, (SAMPLES, 10), generator=generator))


def make_setup() -> tuple[Net, sgp.GradientMemory]:
    torch.manual_seed(0)
    model = Net()
    return model, sgp.GradientMemory(model, threshold=0.95, alpha=3.0)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    (model(inputs) - 1).square().mean().backward()
    optimizer.step()


def train_two_tasks(model: nn.Module, memory: sgp.GradientMemory, loaders: list[Any], **options: Any) -> None:
    """Learn two tasks with some training between the updates."""
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    memory.update(loaders[0], **options)
    for task in range(3):  # all samples, so that every split of them has the same mean gradient
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        take_step(wrapped, optimizer, make_data(task).tensors[0][: SAMPLES // 2 * 2][rank::size])
    memory.update(loaders[1], **options)


WIDTH = 512


def draw_wide(kind: str) -> Tensor:
    """Return rows of fast falling energy; of the second process's rows, ``"late"`` ones end in other directions."""
    generator = torch.Generator().manual_seed(7)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    rows = (torch.randn(3000, WIDTH, generator=generator) / torch.arange(1, WIDTH + 1) ** 1.5) @ turn
    if kind == "late":
        rows[-300:] = torch.randn(300, WIDTH, generator=generator)
    return rows


def update_wide(kind: str, rank: int) -> dict[str, Any]:
    """Two updates of a wide layer whose inputs are not collected in float64; the ranks have unequal shares."""
    sketch.LEAST_BUFFER, sketch.ROWS_PER_PRODUCT = 32, 32
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3, bias=False)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    memory = sgp.GradientMemory(model, threshold=0.95, gram="float32" if kind == "float32" else "sketch")
    own = draw_wide(kind)[: 1200 if rank == 0 else None][0 if rank == 0 else 1200 :]
    reports = [memory.update(list(own.split(100))) for _ in range(2)]
    bases = memory.subspaces["(model)"]
    assert isinstance(bases, Subspace)
    rows, basis = draw_wide(kind).double(), bases.basis[0].double()
    return {
        "digest": storage.digest(memory.state_dict()),
        "captured": float((rows @ basis).square().sum() / rows.square().sum()),
        "reports": [[(layer.path, layer.passes, layer.captured, layer.added) for layer in r.layers] for r in reports],
    }


def list_native_threads() -> list[str]:
    """Return the names of all native threads of this process."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]


def run_process(out: str, mode: str) -> None:
    """Run one of the processes."""
    dist.init_process_group("gloo")
    model, memory = make_setup()
    rank = dist.get_rank()
    loaders = [
        DataLoader(make_data(task), batch_size=4, sampler=DistributedSampler(make_data(task), shuffle=False))
        for task in (0, 1)
    ]
    outcome: dict[str, Any] = {}
    try:
        if mode == "whole":
            train_two_tasks(model, memory, loaders)
        elif mode == "few":
            train_two_tasks(model, memory, loaders, samples=7)
        elif mode == "alone":
            memory.update(loaders[0], distributed=False)
        elif mode.startswith("wide"):
            outcome |= update_wide(mode.partition(" ")[2], rank)
        elif mode == "fails":
            memory.update([make_data(0).tensors[0]] if rank == 0 else [])
        elif mode == "settings":
            memory.update(loaders[0], samples={"*": 5} if rank == 0 else {"nothing": 5})
        elif mode == "shapes":  # one process has no row of a layer
            memory.update(loaders[0], samples=1)
    except (ValueError, RuntimeError) as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
    outcome.setdefault("digest", "")
    outcome["digest"] += storage.digest(memory.state_dict())
    outcome["tasks"] = memory.tasks
    if mode in ("whole", "few"):
        memory.save(Path(out) / f"{rank}.safetensors")
        torch.save(model.state_dict(), Path(out) / f"{rank}.pt")
    dist.destroy_process_group()
    outcome["threads"] = list_native_threads()
    (Path(out) / f"{rank}.json").write_text(json.dumps(outcome))


def load_projectors(path: Path) -> dict[str, Tensor]:
    """Return the projectors of a saved memory as matrices."""
    _, memory = make_setup()
    memory.load(path)
    found = {}
    for name, bases in memory.subspaces.items():
        eye = torch.eye(bases.dimension).unsqueeze(0)
        left = eye.clone()
        if name == "words":
            bases.subtract_projection_(eye, None, left, None)
        else:  # the last input is the constant input of the bias
            bases.subtract_projection_(eye[..., :-1], eye[..., -1], left[..., :-1], left[..., -1])
        found[name] = eye - left
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize("mode", ["whole", "few"])
def test_all_processes_have_the_memory_of_a_single_process(mode: str, tmp_path: Path) -> None:
    outcomes = run_processes(__file__, tmp_path, mode)
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    model, memory = make_setup()
    options = {"samples": 7} if mode == "few" else {}
    train_two_tasks(model, memory, [[make_data(task).tensors] for task in (0, 1)], **options)
    memory.save(tmp_path / "single.safetensors")
    together, single = load_projectors(tmp_path / "0.safetensors"), load_projectors(tmp_path / "single.safetensors")
    assert together.keys() == single.keys()
    for name, projector in single.items():
        torch.testing.assert_close(together[name], projector, atol=1e-6, rtol=0)
    weights = torch.load(tmp_path / "0.pt", weights_only=True)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path", "passes"),
    [("float32", "float32", 1), ("sketch", "sketch", 1), ("late", "float32", 2), ("sharded", "sketch", 1)],
)
def test_wide_layers_are_certified_over_all_processes(kind: str, path: str, passes: int, tmp_path: Path) -> None:
    outcomes = run_processes(__file__, tmp_path, f"wide {kind}")
    assert "error" not in outcomes[0], outcomes[0]["error"]
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    assert outcomes[0]["reports"] == outcomes[1]["reports"]
    ((first,), (second,)) = outcomes[0]["reports"]
    assert first[:2] == [path, passes]
    assert 0.95 <= first[2] <= outcomes[0]["captured"]
    assert second[3] == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="native threads are counted on Linux only")
def test_no_thread_outlives_its_process_group(tmp_path: Path) -> None:
    """A thread that outlives the group may abort the process at its end."""
    for each in run_processes(__file__, tmp_path, "whole"):
        assert len(each["threads"]) == 1, each["threads"]


@pytest.mark.slow
def test_a_failure_in_one_process_is_raised_in_all_and_nothing_changes(tmp_path: Path) -> None:
    ours, theirs = run_processes(__file__, tmp_path, "fails")
    assert theirs["error"].startswith("ValueError: the loader gave no batch")
    assert ours["error"].startswith(
        "RuntimeError: rank 1 failed, so the memory has not changed: ValueError: the loader"
    )
    assert (ours["tasks"], theirs["tasks"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["settings", "shapes", "alone"])
def test_other_settings_give_equal_memories_on_all_processes(mode: str, tmp_path: Path) -> None:
    ours, theirs = run_processes(__file__, tmp_path, mode)
    if mode == "settings":
        assert "nothing" in ours["error"]
        assert "nothing" in theirs["error"]
    elif mode == "shapes":
        assert ours["digest"] == theirs["digest"]
        assert ours["tasks"] == 1
    else:  # each process has the bases of its own shard
        assert ours["digest"] != theirs["digest"]


def make_loader(kind: str, samples: int, rank: int, size: int) -> DataLoader[Any]:
    """Return a loader of a process's own samples in batches of 4."""
    whole = TensorDataset(torch.arange(samples))
    if kind == "torch":
        return DataLoader(whole, batch_size=4, sampler=DistributedSampler(whole, size, rank, shuffle=False))
    shards = pytest.importorskip("accelerate.data_loader")
    batches = BatchSampler(SequentialSampler(whole), 4, drop_last=False)
    shard = shards.BatchSamplerShard(batches, size, rank, split_batches=kind == "accelerate, split")
    return DataLoader(whole, batch_sampler=shard)


@pytest.mark.parametrize("kind", ["torch", "accelerate", "accelerate, split"])
@pytest.mark.parametrize("size", [2, 4])
def test_repeated_samples_of_a_loader_are_not_counted(kind: str, size: int) -> None:
    for samples in range(1, 40):
        taken = []
        for rank in range(size):
            group = ProcessGroup(distributed=False)
            group.rank, group.size = rank, size
            loader = make_loader(kind, samples, rank, size)
            taken += torch.cat([batch for (batch,) in loader]).tolist()[: group.split_samples(None, loader)]
        assert sorted(taken) == list(range(samples))


def test_rows_are_gathered_on_the_device_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(received: list[Tensor], sent: Tensor) -> None:
        assert {tensor.device.type for tensor in (*received, sent)} == {"meta"}
        raise InterruptedError  # the rest needs values

    group = ProcessGroup(distributed=False)
    group.size = 2
    monkeypatch.setattr(group, "_gather_objects", lambda value: [value, value])
    monkeypatch.setattr(group, "_move_to_backend", lambda tensor: tensor.to("meta"))  # in place of an accelerator
    monkeypatch.setattr(dist, "all_gather", all_gather)
    few = InputGram(1, 8)
    few.add(torch.randn(1, 2, 8))
    with pytest.raises(InterruptedError):
        group.merge_grams({"layer": few})


if __name__ == "__main__":
    run_process(sys.argv[1], sys.argv[2])
    if sys.argv[2] == "wide sharded":
        os._exit(0)  # fully_shard keeps the group and its threads, which may abort an interpreter that ends around them
