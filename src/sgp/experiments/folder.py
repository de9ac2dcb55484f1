"""The folder of a run: config, versions, metrics, tables and the checkpoint, readable at any moment.

`metrics.jsonl` is the truth: one event a line, only ever appended to. A checkpoint says how many lines it covers, so a
run that is taken up again drops what was written after it. The tables are made from the metrics and hold nothing else.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import sgp
from sgp import storage
from sgp.experiments.config import AnyConfig, GameConfig, as_yaml, differences, recorded
from sgp.experiments.record import CONFIG as CONFIG
from sgp.experiments.record import METRICS as METRICS
from sgp.experiments.record import RunError as RunError
from sgp.experiments.record import read_metrics as read_metrics
from sgp.methods import METHODS
from sgp.networks import NETWORKS

VERSIONS = "versions.json"
CHECKPOINT = "checkpoint.json"
PARTS = "checkpoint"
LOCK = ".lock"
FORMAT = 1
# How a file is called that a process was writing when it was killed.
LEFTOVER = f".*.{'[0-9a-f]' * 32}"
GAME_PACKAGES = ("stable-baselines3", "gymnasium", "ale-py", "minatar")


class RunFolder:
    """What a run leaves behind.

    Attributes:
        path: of the folder.
        notes: what a person should know who goes on with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._lines = 0
        self._config: str | None = None

    @classmethod
    @contextlib.contextmanager
    def begin(cls, path: Path, config: AnyConfig, *, resume: bool, threads: int | None = None) -> Iterator[RunFolder]:
        """The folder of a new run, or with `resume` of one that was stopped; no other process may have it meanwhile.

        Args:
            path: of the folder.
            config: of the run.
            resume: whether one that is there is gone on with.
            threads: how many are usual, for a config that does not say; without it torch's own number.

        Raises:
            RunError: there is a run already, or one of another config, or another process is at it.
        """
        cls.refuse_existing(path, resume=resume)
        is_new = not os.path.exists(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder {path}: {error.strerror}") from error
        folder = cls(path)
        with folder._alone():
            known = folder.config() if (path / CONFIG).exists() else None
            if config.threads == 0:
                config = replace(config, threads=known.threads if known else threads or torch.get_num_threads())
            if known is None:
                folder._write(CONFIG, as_yaml(config))
            other = list(differences(config, known)) if known else []
            if other:
                raise RunError(f"{path} is a run with other settings ({'; '.join(other)}): use another --name")
            folder._note_versions(packages_of(config))
            for leftover in path.glob(LEFTOVER):
                leftover.unlink()
            try:
                yield folder
            except RunError:
                # Refused before anything was learned: the corrected command is to find its name free.
                if is_new and not (path / METRICS).exists() and not (path / CHECKPOINT).exists():
                    shutil.rmtree(path, ignore_errors=True)
                raise

    @staticmethod
    def refuse_existing(path: Path, *, resume: bool) -> None:
        """A run that is there already is not begun again."""
        # Not Path.exists, which fails for a name that no folder can have.
        if os.path.exists(path / CONFIG) and not resume:
            raise RunError(f"{path} is there already: go on with --resume, or begin another with --name or --out")

    def config(self) -> AnyConfig:
        """Of the run."""
        if not (self.path / CONFIG).is_file():
            raise RunError(f"{self.path} is not the folder of a run: there is no {CONFIG}")
        try:
            return recorded(self.path / CONFIG)
        except ValueError as error:
            raise RunError(f"the config of {self.path} cannot be read: {error}") from error

    def busy(self) -> bool:
        """Whether another process is at it."""
        if not (self.path / LOCK).exists():
            return False
        try:
            with self._alone():
                return False
        except RunError:
            return True

    def standing(self) -> str:
        """How far a run has come, in words after its heading: as far as the checkpoint from which it goes on."""
        events = read_metrics(self.path / METRICS)
        covered = list(islice(events, self._covered()))
        with contextlib.suppress(RunError):  # what comes after is dropped, damaged or not
            if next(events, {}).get("event") == "end":
                return ", learned already"
        if not covered:
            return ""
        last = covered[-1]
        inside = "".join(f", {unit} {last[unit]}" for unit in ("epoch", "update") if unit in last)
        return f", going on after task {last['task'] + 1}{inside}"

    def _covered(self) -> int:
        """How many events the checkpoint covers; none if it cannot be read, of which `load` tells."""
        try:
            return int(json.loads((self.path / CHECKPOINT).read_text(encoding="utf-8"))["lines"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0

    def _note_versions(self, packages: Sequence[str]) -> None:
        """Keep what the run was begun with, and add what it goes on with if that is something else."""
        path, now = self.path / VERSIONS, versions(*packages)
        try:
            seen: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            seen = []
        if seen and now != seen[-1]:
            other = [f"{name} {seen[-1].get(name)}" for name in now if seen[-1].get(name) != now[name]]
            self.notes.append(f"begun with {', '.join(other)}: the last bits may differ from a run without a stop")
        if now not in seen:
            self._write(VERSIONS, json.dumps([*seen, now], indent=2) + "\n")

    def log(self, event: str, **values: Any) -> None:
        """Append an event to the metrics."""
        line = json.dumps({"event": event} | values)
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._lines += 1

    def metrics(self) -> list[dict[str, Any]]:
        """All events that are whole, in their order."""
        return list(read_metrics(self.path / METRICS))

    def save(self, progress: Mapping[str, Any], parts: Mapping[str, dict[str, Any]]) -> None:
        """Write a checkpoint; the one before stays valid until this one is on the disk.

        Args:
            progress: plain values.
            parts: states with tensors. One that has not changed since the last checkpoint is not written again.
        """
        (self.path / PARTS).mkdir(exist_ok=True)
        names = {}
        for name, digest in ((name, storage.digest(_content(state))) for name, state in parts.items()):
            # Called by what is in it: weights that are also the best ones are written once.
            names[name] = f"{digest[:32]}.safetensors"
            if not (self.path / PARTS / names[name]).exists():
                storage.write(self.path / PARTS / names[name], _content(parts[name]), digest)
        if (self.path / METRICS).exists():
            with (self.path / METRICS).open("rb+") as file:
                os.fsync(file.fileno())
        checkpoint = {
            "format": FORMAT,
            "config": self._config or self._config_digest(),
            "lines": self._lines,
            "parts": names,
            "progress": dict(progress),
        }
        storage.write_bytes(self.path / CHECKPOINT, json.dumps(checkpoint, indent=2).encode())
        for path in (self.path / PARTS).iterdir():
            if path.name not in names.values():
                path.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]] | None:
        """Progress and parts of the checkpoint, with the metrics cut back to what it covers; None without one.

        Raises:
            RunError: a file of the checkpoint is damaged, or it is of another config.
        """
        # As the run begins, whatever happens to the file meanwhile.
        self._config = self._config_digest()
        checkpoint, content, lines = self.path / CHECKPOINT, None, 0
        if checkpoint.exists():
            try:
                content = json.loads(checkpoint.read_text(encoding="utf-8"))
                progress, lines = content["progress"], int(content["lines"])
                self._refuse_other_config(content.get("config"))
                parts = {name: self._part(file) for name, file in content["parts"].items()}
            except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
                raise RunError(
                    f"the checkpoint in {self.path} is damaged ({error}): begin again under another --name"
                ) from error
        self._cut(lines)
        return (progress, parts) if content else None

    def _config_digest(self) -> str | None:
        """Of the config's file, which nothing changes once it is written; None without one."""
        path = self.path / CONFIG
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None

    def _refuse_other_config(self, begun_with: str | None) -> None:
        """What is left to learn would not go with what was learned. begun_with: a digest; None in older folders."""
        if begun_with not in (None, self._config):
            raise RunError(
                f"{self.path / CONFIG} has been changed since the run began: put it back as it was, or begin another "
                f"run from it with sgp run {self.path / CONFIG} --name NAME"
            )

    def _part(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = storage.read(self.path / PARTS / name, "checkpoint")["state"]
        return state

    def table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a CSV file, whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        storage.write_bytes(self.path / name, text.encode())

    def _cut(self, lines: int) -> None:
        """Drop events past a number, and a torn last line with them."""
        self._lines = lines
        path = self.path / METRICS
        if not path.exists():
            if lines:
                raise RunError(
                    f"{path} is gone, and the checkpoint with it of no use: begin again under another --name"
                )
            return
        kept = path.read_bytes().split(b"\n")[:-1][:lines]
        if len(kept) < lines:
            raise RunError(
                f"{path} has {len(kept)} lines and its checkpoint covers {lines}: it was cut from outside, so begin "
                "again under another --name"
            )
        with path.open("rb+") as file:
            file.truncate(sum(len(line) + 1 for line in kept))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes off; the lock ends with the process, however it ends."""
        try:
            import fcntl
        except ImportError:  # Windows: two processes in one folder are the user's own care
            yield
            return
        with (self.path / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is running {self.path}") from None
            yield


def _content(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a part's file."""
    return {"format": FORMAT, "state": dict(state)}


def packages_of(config: AnyConfig) -> tuple[str, ...]:
    """What the numbers of a run depend on beside the packages of every run."""
    games = GAME_PACKAGES if isinstance(config, GameConfig) else ()
    return *games, *NETWORKS[config.network].packages, *METHODS[config.method].packages


def versions(*packages: str) -> dict[str, str]:
    """What the numbers of a run may depend on beside its config. packages: more than those of every run."""
    found = {"sgp": sgp.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "numpy", "scikit-learn", "pillow", "safetensors", *packages):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["cpu capability"] = torch.backends.cpu.get_cpu_capability()
    return found | _commit()


def _commit() -> dict[str, str]:
    """Of this package, where it runs from its repository: between two releases the version says too little."""
    root = Path(sgp.__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed; a repository further up would be another's
        return {}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return {"commit": subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}
    return {}
