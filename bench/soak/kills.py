"""Kill runs of every method at random moments; each must end bit-identical to a run that was never killed."""

from __future__ import annotations

import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.processes import Child, command, lines, run_command
from experiments.small import run_until_killed, trace
from rl import signs
from rl.small import METHODS as GAME_SETTINGS
from rl.small import SMALL

from sgp.cli.arguments import write_option
from sgp.methods import METHODS

KILLS = 200
DIGITS = ["digits", "--kind", "split", "--tasks", "2", "--epochs", "2"]
# Methods of the quick campaign, each run with every trainer that supports it.
QUICK = ("sgp", "den")


@dataclass(frozen=True)
class Kind:
    """A kind of run that is killed.

    Attributes:
        trainer: "supervised" or "PPO".
        method: Name of the method.
        arguments: Arguments of `sgp run`.
    """

    trainer: str
    method: str
    arguments: list[str]


def run(folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """Kill runs of all methods with both trainers.

    Args:
        folder: Empty folder.
        quick: Whether to kill a few runs only.
        seed: Seed that draws the moments of the kills.

    Returns:
        Figures of the campaign.
    """
    kinds = [kind for kind in list_kinds() if not quick or kind.method in QUICK]
    total = len(kinds) if quick else KILLS
    killed: dict[str, dict[str, int]] = {}
    faults = []
    for position, kind in enumerate(kinds):
        kills = total // len(kinds) + (position < total % len(kinds))
        name = f"{kind.method} ({kind.trainer})"
        try:
            count = kill_and_compare(folder, kind, kills, random.Random(f"{seed} {name}"))
            killed.setdefault(kind.trainer, {})[kind.method] = count
        except AssertionError as error:
            faults.append(f"{name}: {error}")
    return {"kills": sum(sum(each.values()) for each in killed.values()), "killed runs": killed, "faults": faults}


def list_kinds() -> list[Kind]:
    """Return a run of each method with each trainer that can run it."""
    words = {name: [write_option(name), str(value)] for name, value in SMALL.items()}
    games = ["signs", "--import", str(Path(signs.__file__)), *(word for pair in words.values() for word in pair)]
    kinds = []
    for method in METHODS:
        kinds.append(Kind("supervised", method, [*DIGITS, "--method", method]))
        if not METHODS.facts(method).supervised_only:
            own = [
                word
                for name, value in GAME_SETTINGS.get(method, {}).items()
                for word in (write_option(name), str(value))
            ]
            kinds.append(Kind("PPO", method, [*games, "--method", method, *own]))
    return kinds


def kill_and_compare(folder: Path, kind: Kind, kills: int, generator: random.Random) -> int:
    """Kill a run at random moments, resume it after each kill, and compare it with a run that was never killed.

    Args:
        folder: Folder of both runs, which are removed if they are identical.
        kind: Kind of the run.
        kills: Number of kills.
        generator: Random numbers that draw the moments.

    Returns:
        Number of kills.
    """
    whole, killed = folder / "whole", folder / "killed"
    assert run_command(command(whole, *kind.arguments)) == 0, "the run failed without a kill"
    again, total, count = [*command(killed, *kind.arguments), "--resume"], lines(whole), 0
    # In order, since a run never returns to an earlier moment.
    for wanted in sorted(generator.randrange(total - 1) for _ in range(kills)):
        status = Child(run_until_killed, wanted, generator.randint(1, 4), str(killed), again).end()
        assert status == -signal.SIGKILL, f"the run ended with exit code {status} after {count} kills"
        count += 1
    assert run_command(again) == 0, f"the run does not resume after {count} kills"
    assert trace(killed) == trace(whole), f"the run differs after {count} kills"
    for each in (whole, killed):
        shutil.rmtree(each)
    return count
