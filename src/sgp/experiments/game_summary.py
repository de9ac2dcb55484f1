"""Results of a run on games, computed from its metrics: scores, time, memory and free capacity of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgp.experiments.config import GameConfig
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import sum_seconds, write_resource_tables


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of an agent at one time.

    Attributes:
        step: Steps that the agent had played in all games together.
        scores: Score on each game so far, a mean over whole games.
        normalised: Scores on the scale of each game; None where the scale is not known.
        accumulated: Sum of the normalized scores; None if one is not known.
    """

    step: int
    scores: list[float]
    normalised: list[float | None]
    accumulated: float | None


@dataclass(frozen=True)
class GameSummary:
    """Results of a run on games, finished or not.

    Attributes:
        config: Config of the run.
        names: Names of the games learned so far.
        curve: Every evaluation, in order of steps.
        learned: Evaluation after each game.
        finished: Whether all games of the run have been learned.
        seconds: Wall time by phase.
        bytes: Memory by what it is for, after the last game.
        free: Share of each layer that later games may still use, after the last game.
    """

    config: GameConfig
    names: list[str]
    curve: list[Evaluation]
    learned: list[Evaluation]
    finished: bool
    seconds: dict[str, float]
    bytes: dict[str, int]
    free: dict[str, float]


def read_game_summary(folder: RunFolder) -> GameSummary:
    """Read the results of a run on games from its folder."""
    config, events = folder.read_config(), folder.read_events()
    assert isinstance(config, GameConfig)
    games = [event for event in events if event["event"] == "game"]
    last: dict[str, Any] = games[-1] if games else {"bytes": {}, "free": {}}
    return GameSummary(
        config=config,
        names=[game["name"] for game in games],
        curve=[_parse_evaluation(event) for event in events if event["event"] in ("evaluation", "game")],
        learned=[_parse_evaluation(game) for game in games],
        finished=bool(events) and events[-1]["event"] == "end",
        seconds=sum_seconds(events),
        bytes=last["bytes"],
        free=last["free"],
    )


def write_tables(folder: RunFolder) -> None:
    """Write the CSV files of a run on games. A resumed run repeats all of them except timing.csv."""
    events = folder.read_events()
    games = [event for event in events if event["event"] == "game"]
    names = [game["name"] for game in games]
    curve = [event for event in events if event["event"] in ("evaluation", "game") and event["task"] < len(names)]
    folder.write_table(
        "scores.csv",
        ["step", "learning", "game", "score", "normalised"],
        [
            [event["step"], names[event["task"]], names[number], score, _format_cell(event["normalised"][number])]
            for event in curve
            for number, score in enumerate(event["scores"])
        ],
    )
    folder.write_table(
        "accumulated.csv",
        ["step", "learning", "accumulated"],
        [[event["step"], names[event["task"]], _format_cell(event["accumulated"])] for event in curve],
    )
    write_resource_tables(folder, events, games, "game")


def _parse_evaluation(event: dict[str, Any]) -> Evaluation:
    return Evaluation(event["step"], event["scores"], event["normalised"], event["accumulated"])


def _format_cell(value: float | None) -> object:
    return "" if value is None else value
