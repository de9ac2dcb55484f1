"""The ranks that a memory really has: AlexNet on Split CIFAR-100 with the paper's settings.

    python -m bench.ranks --data DIR --tasks 5 --epochs 5 --seed 0

DIR holds ``cifar-100-python/``. After each task the state is kept in the checkpoint file: the same command
goes on from there. After the first task a table is added that shows how samples and threshold together set
the ranks, and how much of the energy of all training images the bases then hold.
"""

import argparse
import copy
import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import sgp
from sgp.benchmarks import split_cifar100
from sgp.benchmarks.settings import SplitCIFAR100
from sgp.benchmarks.stream import Examples, Task
from sgp.networks.alexnet import AlexNet
from sgp.projection.collect import collect_inputs
from sgp.projection.gram import GramPath
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.subspace import Subspace

# Settings of the published run. `samples` are images per layer.
BATCH = 64
ALPHA = 10.0
PAPER_SAMPLES = {"conv1": 24, "conv2": 100, "conv3": 100, "*": 125}
# The lr is halved after `PATIENCE` epochs without a better validation loss, down to `LR_MIN`.
LR, LR_MIN, LR_FACTOR, PATIENCE = 0.05, 5e-5, 2, 6
# Images per forward pass when representations are taken: BatchNorm uses the statistics of these.
REPRESENTATION_BATCH = 125

TABLE_SAMPLES = (125, 1000, None)
TABLE_THRESHOLDS = (0.90, 0.95, 0.97, 0.99)


def threshold(task: int) -> float:
    """Return the threshold of a task, which the paper raises with each task."""
    return 0.97 + 0.003 * task


def train(model: AlexNet, memory: sgp.GradientMemory, data: Task, index: int, epochs: int, seed: int) -> None:
    """Train one task as published: plain SGD, ending with the weights of the best validation loss."""
    # Seeded by task, so that a run that was stopped between tasks goes on as if it had not been.
    torch.manual_seed(1000 * seed + index)
    order = torch.Generator().manual_seed(1000 * seed + index)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    memory.attach(optimizer)
    images, labels = data.train.inputs, data.train.labels
    best, best_state, patience, lr = math.inf, copy.deepcopy(model.state_dict()), PATIENCE, LR
    for epoch in range(epochs):
        model.train()
        for chosen in torch.split(torch.randperm(len(labels), generator=order), BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(images[chosen], task=index), labels[chosen]))
            optimizer.step()
        loss, accuracy = evaluate(model, data.validation, index)
        print(f"task {index} epoch {epoch + 1}: validation loss {loss:.3f}, accuracy {accuracy:.1%}", flush=True)
        if loss < best:
            best, best_state, patience = loss, copy.deepcopy(model.state_dict()), PATIENCE
            continue
        patience -= 1
        if patience == 0:
            lr, patience = lr / LR_FACTOR, PATIENCE
            if lr < LR_MIN:
                break
            optimizer.param_groups[0]["lr"] = lr
    model.load_state_dict(best_state)


@torch.no_grad()
def evaluate(model: AlexNet, part: Examples, index: int) -> tuple[float, float]:
    """Mean loss and accuracy of one task's head."""
    model.eval()
    logits = torch.cat([model(batch, task=index) for batch in torch.split(part.inputs, BATCH)])
    return float(F.cross_entropy(logits, part.labels)), float((logits.argmax(1) == part.labels).float().mean())


def shuffled(images: Tensor, seed: int) -> list[Tensor]:
    """All images in random order, in the batches that representations are taken with."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return list(torch.split(images[order], REPRESENTATION_BATCH))


def samples_and_threshold(model: AlexNet, images: Tensor, seed: int) -> list[dict[str, object]]:
    """How many bases each number of samples and threshold gives, and what they hold of all images.

    `energy` is the share of the energy of all images' inputs that lies in the bases; `best` is the largest
    share that as many bases can hold.
    """
    layers = list(scan_model(model, ScanRules(exclude=("heads.*",))).layers.values())
    names = [layer.name for layer in layers]
    batches = shuffled(images, seed)
    statistics = {
        count: collect_inputs(
            model,
            batches,
            layers,
            samples=dict.fromkeys(names, count),
            paths=dict.fromkeys(names, GramPath(threshold=max(TABLE_THRESHOLDS))),
        )
        for count in TABLE_SAMPLES
    }
    table: list[dict[str, object]] = []
    for name in names:
        gram = statistics[None][name].get_gram()[0]
        total = float(gram.trace())
        spectrum = torch.linalg.eigvalsh(gram).flip(0).cumsum(0) / total
        for count in TABLE_SAMPLES:
            for limit in TABLE_THRESHOLDS:
                statistic = statistics[count][name]
                empty = Subspace.empty(1, statistic.dimension)
                M = empty.grow(statistic, threshold=limit, alpha=math.inf).basis[0].double()
                rank = M.shape[1]
                table.append(
                    {
                        "layer": name,
                        "samples": len(images) if count is None else count,
                        "threshold": limit,
                        "rank": rank,
                        "dimension": statistic.dimension,
                        "energy": round(float(((gram @ M) * M).sum()) / total, 4),
                        "best": round(float(spectrum[rank - 1]), 4) if rank else 0.0,
                    }
                )
    return table


def ranks(memory: sgp.GradientMemory) -> dict[str, int]:
    """Bases of each layer."""
    return {name: int(subspace.rank.sum()) for name, subspace in memory.subspaces.items()}


def importances(memory: sgp.GradientMemory) -> dict[str, dict[str, float]]:
    """Return how many bases of each layer are fully blocked, and its free capacity."""
    return {name: {"blocked": s.blocked, "free": round(s.free, 4)} for name, s in memory.subspaces.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the tasks that the checkpoint does not hold yet and give the report."""
    samples: Mapping[str, int] | int | None
    if arguments.samples == "paper":
        samples = PAPER_SAMPLES
    else:
        samples = None if arguments.samples == "all" else int(arguments.samples)
    torch.manual_seed(arguments.seed)
    model = AlexNet()
    memory = sgp.GradientMemory(model, threshold=threshold, alpha=ALPHA, exclude=["heads.*"])
    report: dict[str, Any] = {
        "command": f"python -m bench.ranks --data DIR --tasks {arguments.tasks} --epochs {arguments.epochs} "
        f"--seed {arguments.seed} --samples {arguments.samples}",
        "settings": {
            "network": "AlexNet",
            "lr": LR,
            "batch": BATCH,
            "alpha": ALPHA,
            "threshold": "0.97 + 0.003 task",
            "samples": samples or "all",
            "seed": arguments.seed,
            "epochs": arguments.epochs,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "dimensions": {},
        "tasks": [],
        "samples_and_threshold": [],
    }
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        before = json.loads(saved["report"])
        if before["settings"] != json.loads(json.dumps(report["settings"])):
            raise SystemExit(f"{arguments.checkpoint} is of a run with other settings: remove it or name another")
        report |= {key: before[key] for key in ("dimensions", "tasks", "samples_and_threshold")}
        model.load_state_dict(saved["model"])
        memory.load_state_dict(saved["memory"])

    stream = split_cifar100.load_stream(SplitCIFAR100(tasks=arguments.tasks), arguments.data, arguments.seed)
    data = [stream[index] for index in range(len(stream))]
    for index in range(len(report["tasks"]), arguments.tasks):
        train(model, memory, data[index], index, arguments.epochs, arguments.seed)
        batches = shuffled(data[index].train.inputs, 1000 * arguments.seed + index)
        memory.update(batches, samples=samples)
        accuracy = [round(evaluate(model, data[i].test, i)[1], 4) for i in range(index + 1)]
        report["tasks"].append(
            {"task": index, "ranks": ranks(memory), "capacity": importances(memory), "accuracy": accuracy}
        )
        report["dimensions"] = {name: subspace.dimension for name, subspace in memory.subspaces.items()}
        print(f"task {index}: ranks {ranks(memory)}, accuracy {accuracy}", flush=True)
        if index == 0:
            report["samples_and_threshold"] = samples_and_threshold(model, data[0].train.inputs, arguments.seed)
        arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"model": model.state_dict(), "memory": memory.state_dict(), "report": json.dumps(report)},
            arguments.checkpoint,
        )
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    """Parse the command and run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cifar-100-python/")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="per task; the paper has at most 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", default="paper", help="'paper' (24/100/100/125/125 per layer), a number, or 'all'")
    parser.add_argument("--threads", type=int, help="threads that torch may use")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("ranks.json"))
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/ranks.pt"))
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    run(arguments)


if __name__ == "__main__":
    main()
