"""What a run on games has come to, made from its metrics: scores, time, memory and what is left of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgp.experiments.config import GameConfig
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import seconds_by_phase


@dataclass(frozen=True)
class Evaluation:
    """Of an agent at one time.

    Attributes:
        step: how many steps it had played in all games together.
        scores: on each game so far, a mean over whole games.
        normalised: the same on the scale of each game; None where none is known.
        accumulated: the sum of those; None if one is not known.
    """

    step: int
    scores: list[float]
    normalised: list[float | None]
    accumulated: float | None


@dataclass(frozen=True)
class GameSummary:
    """What a run on games has come to, finished or not.

    Attributes:
        config: of the run.
        names: of the games learned so far.
        curve: every evaluation, in order of steps.
        learned: the evaluation after each game.
        finished: whether all games of the run have been learned.
        seconds: wall time by phase.
        bytes: memory by what it is for, after the last game.
        free: share of each layer that later games may still use, after the last game.
    """

    config: GameConfig
    names: list[str]
    curve: list[Evaluation]
    learned: list[Evaluation]
    finished: bool
    seconds: dict[str, float]
    bytes: dict[str, int]
    free: dict[str, float]


def game_summary_of(folder: RunFolder) -> GameSummary:
    """What the folder of a run on games tells."""
    config, events = folder.config(), folder.metrics()
    assert isinstance(config, GameConfig)
    games = [event for event in events if event["event"] == "game"]
    last: dict[str, Any] = games[-1] if games else {"bytes": {}, "free": {}}
    return GameSummary(
        config=config,
        names=[game["name"] for game in games],
        curve=[_evaluation(event) for event in events if event["event"] in ("evaluation", "game")],
        learned=[_evaluation(game) for game in games],
        finished=bool(events) and events[-1]["event"] == "end",
        seconds=seconds_by_phase(events),
        bytes=last["bytes"],
        free=last["free"],
    )


def write_tables(folder: RunFolder) -> None:
    """Write the CSV files of a run on games. Clocks are in timing.csv alone: the others repeat in a resumed run."""
    events = folder.metrics()
    games = [event for event in events if event["event"] == "game"]
    names = [game["name"] for game in games]
    curve = [event for event in events if event["event"] in ("evaluation", "game") and event["task"] < len(names)]
    folder.table(
        "scores.csv",
        ["step", "learning", "game", "score", "normalised"],
        [
            [event["step"], names[event["task"]], names[number], score, _cell(event["normalised"][number])]
            for event in curve
            for number, score in enumerate(event["scores"])
        ],
    )
    folder.table(
        "accumulated.csv",
        ["step", "learning", "accumulated"],
        [[event["step"], names[event["task"]], _cell(event["accumulated"])] for event in curve],
    )
    folder.table(
        "capacity.csv",
        ["after game", "layer", "free"],
        [[game["name"], layer, free] for game in games for layer, free in game["free"].items()],
    )
    folder.table(
        "memory.csv",
        ["after game", "what for", "bytes"],
        [[game["name"], use, count] for game in games for use, count in game["bytes"].items()],
    )
    timing = []
    for game in games:
        own = [event for event in events if event.get("task") == game["task"]]
        timing += [[game["name"], phase, round(seconds, 3)] for phase, seconds in seconds_by_phase(own).items()]
    folder.table("timing.csv", ["game", "phase", "seconds"], timing)


def _evaluation(event: dict[str, Any]) -> Evaluation:
    return Evaluation(event["step"], event["scores"], event["normalised"], event["accumulated"])


def _cell(value: float | None) -> object:
    return "" if value is None else value
