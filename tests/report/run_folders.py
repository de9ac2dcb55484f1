"""Write folders of runs as the runs leave them, without running anything."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.paper import scores as scores_of


def make_bases(count: int, task: int) -> dict[str, Any]:
    curve = [[position, round(1 / position, 4)] for position in range(1, count + 1)]
    return {"count": count, "of": 16, "blocked": task + 1, "importances": curve, "singular values": curve}


def write_run(
    path: Path,
    config: Config[Any],
    rows: Sequence[Sequence[float]],
    *,
    names: Sequence[str] = (),
    seconds: float = 60.0,
    extra: int = 2**20,
    end: bool = True,
    is_current: bool = True,
    layers: Sequence[str] = ("fc1",),
) -> Path:
    """Write a run.

    Args:
        path: Folder of the run.
        config: Config of the run.
        rows: Accuracies after each task.
        names: Names of the tasks.
        seconds: Training time of the run.
        extra: Bytes that are stored beside the network.
        end: Whether the run is finished.
        is_current: Whether the metrics have what older versions did not record.
        layers: Layers that GPM and SGP record; the later, the less is free.

    Returns:
        Folder of the run.
    """
    layers = layers if config.method in ("gpm", "sgp") else ()
    with RunFolder.begin(path, config, resume=False) as folder:
        for task, row in enumerate(rows):
            folder.log("epoch", task=task, epoch=1, seconds={"train": seconds / len(rows)})
            more: dict[str, Any] = {}
            if is_current:
                more["data"] = {"inputs": [3, 8, 8], "classes": 5, "train": 1200, "validation": 60, "test": 100}
                more["bases"] = {layer: make_bases(4 + task, task) for layer in layers}
            folder.log(
                "task",
                task=task,
                name=names[task] if names else f"task number {task}",
                accuracies=list(row),
                free={layer: 0.9 - 0.1 * task - 0.01 * number for number, layer in enumerate(layers)},
                capacity=2000.0 if config.method == "stl" else 100.0,
                bytes={"network": 2**22, "bases": extra},
                seconds={},
                **more,
            )
        if end:
            folder.log("end", acc=1.0)
    return path


def make_rows(tasks: int, start: float = 80.0, loss: float = 1.0) -> list[list[float]]:
    """Return accuracies of tasks that are learned equally well and lose `loss` points with every later task."""
    return [[start - loss * (after - task) for task in range(after + 1)] for after in range(tasks)]


def write_digits_run(
    place: Path, method: str, seed: int = 0, *, start: float = 80.0, name: str = "", **settings: Any
) -> Path:
    """Return the folder of a new run on digits."""
    config = configure("digits", method, seed=seed, threads=1, **settings)
    tasks = settings.get("tasks", 10)
    given = "".join(f"-{key}{value}" for key, value in settings.items())
    return write_run(place / (name or f"{method}-{seed}{given}"), config, make_rows(tasks, start))


def write_games_run(
    place: Path,
    method: str,
    seed: int = 0,
    *,
    level: float = 1.0,
    names: Sequence[str] = ("breakout", "freeway"),
    **settings: Any,
) -> Path:
    """Return the folder of a new run on small games. Each game is evaluated three times.

    Games that sgp.paper does not have are of unknown scale.
    """
    config = configure("minatar", method, seed=seed, threads=1, games=",".join(names), **settings)
    known = all(name in scores_of("minatar") for name in names)
    path = place / "-".join(["minatar", method, str(seed), *names, *(f"{k}{v}" for k, v in settings.items())])
    with RunFolder.begin(path, config, resume=False) as folder:
        for game, name in enumerate(names):
            more = {"name": name, "free": {}, "capacity": 100.0, "bytes": {"network": 9, "bases": 3}}
            for update in range(3):
                scores = [10.0 * level * (update + 1)] * (game + 1)
                normalised = [score / 30 if known else None for score in scores]
                folder.log(
                    "game" if update == 2 else "evaluation",
                    task=game,
                    update=update,
                    step=1_000_000 * (2 * game + update),
                    scores=scores,
                    normalised=normalised,
                    accumulated=sum(scores) / 30 if known else None,
                    seconds={"play": 30.0},
                    **(more if update == 2 else {}),
                )
        folder.log("end")
    return path
