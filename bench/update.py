"""A memory update on given representation matrices: one decomposition a layer against the published SVDs."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from bench import published
from bench.row import Row
from bench.timing import take_turns
from sgp.projection.gram import InputGram
from sgp.projection.subspace import Subspace

# AlexNet on Split CIFAR-100: length of a row and number of rows that the published sample counts give.
SIZES = {
    "conv1": (48, 20184),
    "conv2": (576, 14400),
    "conv3": (512, 2500),
    "fc1": (1024, 125),
    "fc2": (2048, 125),
}
THRESHOLDS = (0.97, 0.973)
ALPHA = 10.0
GOAL = 1 / 20


def representations(seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows [n, d] in float32 of each layer for two tasks.

    Their singular values fall off as a power of their number, like those of real activations; half of the
    second task's energy lies in directions of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    first, second = {}, {}
    for name, (d, n) in SIZES.items():
        fall = torch.arange(1, d + 1).float() ** -0.8
        old, new = (torch.linalg.qr(torch.randn(d, d, generator=generator)).Q for _ in range(2))
        first[name] = (torch.randn(n, d, generator=generator) * fall) @ old
        second[name] = (torch.randn(n, d, generator=generator) * fall) @ ((old + new) / 2**0.5)
    return [first, second]


def update(old: Mapping[str, Subspace], rows: Mapping[str, Tensor], threshold: float) -> dict[str, Subspace]:
    """Return the subspaces of all layers after one more task."""
    grown = {}
    for name, layer in rows.items():
        statistic = InputGram(1, layer.shape[1])
        statistic.add(layer.unsqueeze(0))
        grown[name] = old[name].grow(statistic, threshold=threshold, alpha=ALPHA)
    return grown


def rows(*, rounds: int = 3) -> list[Row]:
    """Measure the first task's update (published: one SVD per layer) and the second task's (published: three)."""
    tasks = representations()
    columns = [
        {
            name: np.ascontiguousarray(layer.numpy().T, dtype=np.float64 if "conv" in name else np.float32)
            for name, layer in task.items()
        }
        for task in tasks
    ]
    empty = {name: Subspace.empty(1, d) for name, (d, _) in SIZES.items()}
    ours = update(empty, tasks[0], THRESHOLDS[0])
    theirs = {name: published.first_update(R, THRESHOLDS[0], ALPHA) for name, R in columns[0].items()}

    def published_first() -> None:
        for R in columns[0].values():
            published.first_update(R, THRESHOLDS[0], ALPHA)

    def published_second() -> None:
        for name, R in columns[1].items():
            published.next_update(theirs[name], R, THRESHOLDS[1], ALPHA)

    after = update(ours, tasks[1], THRESHOLDS[1])
    ranks = [{name: int(s.rank.sum()) for name, s in state.items()} for state in (ours, after)]
    measurements: list[tuple[str, Callable[[], object], Callable[[], object], float | None]] = [
        ("Memory update, task 1", lambda: update(empty, tasks[0], THRESHOLDS[0]), published_first, None),
        ("Memory update, task 2", lambda: update(ours, tasks[1], THRESHOLDS[1]), published_second, GOAL),
    ]
    out = []
    for (name, run, run_published, goal), rank in zip(measurements, ranks, strict=True):
        times = take_turns({"sgp": run, "published": run_published}, rounds=rounds)
        out.append(
            Row(
                name=name,
                unit="s",
                amounts={way: times.median(way) for way in times.seconds},
                against="published",
                ratio=times.ratio("sgp", to="published"),
                goal=goal,
                detail={"ranks": rank, "rounds": dict(times.seconds), "sizes": SIZES},
            )
        )
    return out
