"""A memory update of one wide linear layer against the forward passes of the same rows.

Seconds are those of the processor, which other work on the machine does not lengthen; take ``OMP_NUM_THREADS=1``.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sgp
from bench.row import Row
from bench.timing import Times
from sgp.projection.subspace import Subspace
from sgp.projection.update_report import UpdateReport

ROWS = 8192
BATCH = 256
THRESHOLD = 0.95
ALPHA = 10
# Dimension, exponent of the singular values, and the goals of the first and of the second task.
CASES: Sequence[tuple[int, float, float, float | None]] = (
    (1024, 0.7, 2.5, 2.2),
    (2048, 0.7, 2.2, 2.0),
    (4096, 0.7, 2.0, 1.8),
    (4096, 1.0, 1.5, None),
    (8192, 1.0, 1.5, None),
)
# Above this dimension the float64 path is not measured: it takes minutes.
LARGEST_FLOAT64 = 2048
# Bytes held after the first rows at dimension 4096, where at most a sixteenth of all directions is needed.
GOAL_BYTES = 20e6


def make_data(dimension: int, exponent: float, seed: int) -> Tensor:
    """Return rows whose singular values fall off as a power of their number, [ROWS, dimension]."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, dimension, generator=generator) * torch.arange(1, dimension + 1) ** -exponent
    for _ in range(4):  # reflections turn the axes, and cost nothing beside a rotation of 8192 dimensions
        normal = torch.nn.functional.normalize(torch.randn(dimension, generator=generator), dim=0)
        rows -= 2 * (rows @ normal).unsqueeze(1) * normal
        rows = rows[:, torch.randperm(dimension, generator=generator)]
    return rows


def make_memory(dimension: int, gram: Any, state: dict[str, Any] | None = None) -> sgp.GradientMemory:
    """Return a memory of a linear layer, which goes on from the bases of another one's state."""
    torch.manual_seed(0)
    model = nn.Linear(dimension, dimension, bias=False)
    memory = sgp.GradientMemory(model, threshold=THRESHOLD, alpha=ALPHA, gram=gram, anchor=False)
    if state is not None:
        memory.load_state_dict({**state, "settings": {**state["settings"], "gram": gram}})
    return memory


def measure_captured(memory: sgp.GradientMemory, rows: Tensor) -> float:
    """Return the share of the energy of rows that the bases capture, in float64."""
    bases = memory.subspaces["(model)"]
    assert isinstance(bases, Subspace)
    basis = bases.basis[0].double()
    parts = [(part.double() @ basis).square().sum() for part in torch.split(rows, BATCH)]
    return float(torch.stack(parts).sum() / rows.double().square().sum())


def measure(
    batches: list[Tensor], dimension: int, state: dict[str, Any] | None, ways: Sequence[str], rounds: int
) -> tuple[Times, dict[str, sgp.GradientMemory], dict[str, UpdateReport]]:
    """Time the forward passes, and an update by each path, in turns."""
    model = make_memory(dimension, "auto").model
    seconds: dict[str, list[float]] = {way: [] for way in ("forward", *ways)}
    memories, reports = {}, {}

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    for _ in range(rounds):
        seconds["forward"].append(_time(forward))
        for way in ways:
            memory = memories[way] = make_memory(dimension, way, state)

            def update(way: str = way, memory: sgp.GradientMemory = memory) -> None:
                reports[way] = memory.update(batches, allow_unattached=True)

            seconds[way].append(_time(update))
    return Times(seconds), memories, reports


def _time(work: Callable[[], None]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def rows(*, rounds: int = 3) -> list[Row]:
    """First and second tasks at each dimension, and the bytes of a sketch."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)  # the first optimizer of a process imports for seconds
    out = []
    for dimension, exponent, *goals in CASES:
        ways = ["auto", *(["float64"] if dimension <= LARGEST_FLOAT64 else [])]
        state: dict[str, Any] | None = None
        old = torch.zeros(())
        for task, goal in enumerate(goals, start=1):
            if goal is None:
                continue
            data = make_data(dimension, exponent, task)
            # Half of the second task's energy lies in the directions of the first.
            data = data if task == 1 else (data + old) / 2**0.5
            old = data
            times, memories, reports = measure(list(torch.split(data, BATCH)), dimension, state, ways, rounds)
            (layer,) = reports["auto"].layers
            name = f"Update of a layer of width {dimension}, exponent {exponent}, task {task}"
            detail: dict[str, object] = {
                "path": layer.path,
                "passes": layer.passes,
                "bases": layer.bases,
                "certified": layer.captured,
                "captured": measure_captured(memories["auto"], data),
                "bytes": layer.bytes,
                "rounds": dict(times.seconds),
            }
            if "float64" in ways:
                detail["bases in float64"] = reports["float64"].layers[0].bases
                detail["float64 to forward"] = times.ratio("float64", to="forward")
            out.append(
                Row(
                    name=name,
                    unit="s",
                    amounts={"plain": times.median("forward"), "sgp": times.median("auto")},
                    against="plain",
                    ratio=times.ratio("auto", to="forward"),
                    goal=goal,
                    note=f"{layer.path}, {layer.bases} bases, {layer.bytes / 1e6:.0f} MB",
                    detail=detail,
                )
            )
            if dimension == 4096 and layer.path == "sketch":
                out.append(
                    Row(
                        name=f"Bytes held for a layer of width {dimension}, exponent {exponent}",
                        unit="bytes",
                        amounts={"plain": 8.0 * dimension**2, "sgp": float(layer.bytes)},
                        against="plain",
                        ratio=layer.bytes / (8 * dimension**2),
                        goal=GOAL_BYTES / (8 * dimension**2),
                        note=f"before that, {4 * dimension * dimension // 2 / 1e6:.0f} MB of rows",
                    )
                )
            state = memories["auto"].state_dict()
    return out
