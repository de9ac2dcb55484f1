"""Folder of a run: config, versions, metrics, tables and the checkpoint, readable at any moment.

`metrics.jsonl` is the truth: one event a line, only ever appended to. A checkpoint says how many lines it covers, so a
run that resumes drops what was written after it. The tables are computed from the metrics and contain nothing else.
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
from sgp.experiments.config import Config, as_yaml, find_differences, read_recorded
from sgp.experiments.record import CONFIG as CONFIG
from sgp.experiments.record import METRICS as METRICS
from sgp.experiments.record import RunError as RunError
from sgp.experiments.record import iterate_whole_events
from sgp.methods import METHODS
from sgp.networks import NETWORKS

VERSIONS = "versions.json"
CHECKPOINT = "checkpoint.json"
PARTS = "checkpoint"
LOCK = ".lock"
FORMAT = 1
# Pattern of files that a process was writing when it was killed.
LEFTOVER = f".*.{'[0-9a-f]' * 32}"
GAME_PACKAGES = ("stable-baselines3", "gymnasium", "ale-py", "minatar")


class RunFolder:
    """Files of a run.

    Args:
        path: Path of the folder.

    Attributes:
        path: Path of the folder.
        warnings: What the user should know before the run continues.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._lines = 0
        self._config: str | None = None

    @classmethod
    @contextlib.contextmanager
    def begin(cls, path: Path, config: Config[Any], *, resume: bool) -> Iterator[RunFolder]:
        """Lock the folder of a new run, or of a stopped run with `resume`, for this process.

        Args:
            path: Path of the folder.
            config: Config of the run; without a number of threads it gets the recorded one, or torch's own.
            resume: Whether a run that exists there is resumed.

        Raises:
            RunError: The folder has a run already, a run with another config, or another process runs it.
        """
        cls.check_unused(path, resume=resume)
        is_new = not os.path.exists(path)
        new_parents = [parent for parent in path.parents if not os.path.exists(parent)]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create the folder {path}: {error.strerror}") from error
        folder = cls(path)
        with folder._lock():
            known = folder.read_config() if (path / CONFIG).exists() else None
            if config.threads == 0:
                config = replace(config, threads=known.threads if known else torch.get_num_threads())
            if known is None:
                folder._write(CONFIG, as_yaml(config))
            other = list(find_differences(config, known)) if known else []
            if other:
                raise RunError(f"{path} is a run with other settings ({'; '.join(other)}): use another --name")
            folder._record_versions(list_packages(config))
            for leftover in path.glob(LEFTOVER):
                leftover.unlink()
            try:
                yield folder
            except (RunError, ValueError):
                # Nothing was learned yet, so the corrected command can use the same name.
                if is_new and not (path / METRICS).exists() and not (path / CHECKPOINT).exists():
                    shutil.rmtree(path, ignore_errors=True)
                    with contextlib.suppress(OSError):  # another run may have started there
                        for parent in new_parents:
                            parent.rmdir()
                raise

    @staticmethod
    def check_unused(path: Path, *, resume: bool) -> None:
        """Raise an error if the folder has a run, unless that run is to be resumed."""
        # Not Path.exists, which fails for a name that no folder can have.
        if os.path.exists(path / CONFIG) and not resume:
            raise RunError(f"{path} already exists: resume it with --resume, or start another run with --name or --out")

    def read_config(self) -> Config[Any]:
        """Read the run's config."""
        if not (self.path / CONFIG).is_file():
            raise RunError(f"{self.path} is not the folder of a run: there is no {CONFIG}")
        try:
            return read_recorded(self.path / CONFIG)
        except ValueError as error:
            raise RunError(f"the config of {self.path} cannot be read: {error}") from error

    def is_running(self) -> bool:
        """Return whether another process holds the lock."""
        if not (self.path / LOCK).exists():
            return False
        try:
            with self._lock():
                return False
        except RunError:
            return True

    def describe_progress(self) -> str:
        """Describe the progress of the checkpoint that the run resumes from, as a suffix of the run's heading."""
        events = iterate_whole_events(self.path / METRICS)
        covered = list(islice(events, self._count_covered_events()))
        with contextlib.suppress(RunError):  # later events are dropped, damaged or not
            if next(events, {}).get("event") == "end":
                return ", already finished"
        if not covered or not isinstance(covered[-1].get("task"), int):
            return ""
        last = covered[-1]
        inside = "".join(f", {unit} {last[unit]}" for unit in ("epoch", "update") if unit in last)
        return f", resuming after task {last['task'] + 1}{inside}"

    def _count_covered_events(self) -> int:
        """Return how many events the checkpoint covers; 0 if it cannot be read, which `load` reports."""
        try:
            return int(json.loads((self.path / CHECKPOINT).read_text(encoding="utf-8"))["lines"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _record_versions(self, packages: Sequence[str]) -> None:
        """Record the versions that the run was started with, and those it resumes with if they differ."""
        path, now = self.path / VERSIONS, collect_versions(*packages)
        try:
            seen: list[dict[str, str]] = [dict(each) for each in json.loads(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            seen = []
        if seen and now != seen[-1]:
            other = [f"{name} {seen[-1].get(name)}" for name in now if seen[-1].get(name) != now[name]]
            self.warnings.append(
                f"started with {', '.join(other)}: results may differ in the last bits from an uninterrupted run"
            )
        if now not in seen:
            self._write(VERSIONS, json.dumps([*seen, now], indent=2) + "\n")

    def log(self, event: str, **values: Any) -> None:
        """Append an event to the metrics."""
        line = json.dumps({"event": event} | values)
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._lines += 1

    def read_events(self) -> list[dict[str, Any]]:
        """Read all complete events in order."""
        return list(iterate_whole_events(self.path / METRICS))

    def save(self, progress: Mapping[str, Any], parts: Mapping[str, dict[str, Any]]) -> None:
        """Write a checkpoint. The previous one stays valid until this one is on disk.

        Args:
            progress: Plain values.
            parts: States with tensors. A part that has not changed since the last checkpoint is not written again.
        """
        (self.path / PARTS).mkdir(exist_ok=True)
        names = {}
        for name, digest in ((name, storage.digest(_wrap_state(state))) for name, state in parts.items()):
            # Named by content: weights that are also the best ones are written once.
            names[name] = f"{digest[:32]}.safetensors"
            if not (self.path / PARTS / names[name]).exists():
                storage.write(self.path / PARTS / names[name], _wrap_state(parts[name]), digest)
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
        checkpoint["digest"] = _digest_checkpoint(checkpoint)
        storage.write_bytes(self.path / CHECKPOINT, json.dumps(checkpoint, indent=2).encode())
        for path in (self.path / PARTS).iterdir():
            if path.name not in names.values():
                path.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]] | None:
        """Read the progress and parts of the checkpoint, and truncate the metrics to what it covers.

        Returns:
            Progress and parts, or None without a checkpoint.

        Raises:
            RunError: A file of the checkpoint is damaged, or the config has changed since it was written.
        """
        # Of the config that the run starts with, even if the file changes meanwhile.
        self._config = self._config_digest()
        checkpoint, content, lines = self.path / CHECKPOINT, None, 0
        if checkpoint.exists():
            try:
                content = json.loads(checkpoint.read_text(encoding="utf-8"))
                progress, lines = content["progress"], int(content["lines"])
                # Checkpoints of older versions have no digest.
                if content.get("digest", _digest_checkpoint(content)) != _digest_checkpoint(content):
                    raise ValueError("its content does not match its digest")
                self._check_config(content.get("config"))
                parts = {name: self._read_part(file) for name, file in content["parts"].items()}
            except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
                raise RunError(
                    f"the checkpoint in {self.path} is damaged ({error}): start again under another --name"
                ) from error
        self._truncate_metrics(lines)
        return (progress, parts) if content else None

    def _config_digest(self) -> str | None:
        """Return the digest of the config's file, which never changes after it was written; None without one."""
        path = self.path / CONFIG
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None

    def _check_config(self, started_with: str | None) -> None:
        """Raise an error if the config has changed since the run was started.

        Args:
            started_with: Digest of the config; None in folders of older versions.
        """
        if started_with not in (None, self._config):
            raise RunError(
                f"{self.path / CONFIG} has changed since the run was started: restore it, or start another "
                f"run from it with sgp run {self.path / CONFIG} --name NAME"
            )

    def _read_part(self, name: str) -> dict[str, Any]:
        path = self.path / PARTS / name
        state: dict[str, Any] = storage.read(path, "checkpoint", digest=path.stem)["state"]
        return state

    def write_table(self, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a CSV file whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        self._write(name, text.getvalue())

    def _write(self, name: str, text: str) -> None:
        storage.write_bytes(self.path / name, text.encode())

    def _truncate_metrics(self, lines: int) -> None:
        """Drop all events after a number of lines, and an incomplete last line."""
        self._lines = lines
        path = self.path / METRICS
        if not path.exists():
            if lines:
                raise RunError(f"{path} is missing, so the checkpoint cannot be used: start again under another --name")
            return
        kept = path.read_bytes().split(b"\n")[:-1][:lines]
        if len(kept) < lines:
            raise RunError(
                f"{path} has {len(kept)} lines but the checkpoint covers {lines}: start again under another --name"
            )
        with path.open("rb+") as file:
            file.truncate(sum(len(line) + 1 for line in kept))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the folder's lock, which the system releases when the process ends in any way."""
        try:
            import fcntl
        except ImportError:  # Windows has no such lock
            yield
            return
        with (self.path / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"another process is running {self.path}") from None
            yield


def _digest_checkpoint(checkpoint: Mapping[str, Any]) -> str:
    """Return the digest of a checkpoint's plain values."""
    values = {name: value for name, value in checkpoint.items() if name != "digest"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _wrap_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a part's file."""
    return {"format": FORMAT, "state": dict(state)}


def list_packages(config: Config[Any]) -> tuple[str, ...]:
    """Return the packages that a run's numbers depend on beside those of every run."""
    games = GAME_PACKAGES if config.is_game else ()
    return *games, *NETWORKS[config.network].packages, *METHODS.facts(config.method).packages


def collect_versions(*packages: str) -> dict[str, str]:
    """Return the versions that a run's numbers may depend on.

    Args:
        packages: Packages beside those of every run.
    """
    found = {"sgp": sgp.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "numpy", "scikit-learn", "pillow", "safetensors", *packages):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    found["cpu capability"] = torch.backends.cpu.get_cpu_capability()
    return found | _find_commit()


def _find_commit() -> dict[str, str]:
    """Return the commit of this package if it runs from its repository: a version number covers many commits."""
    root = Path(sgp.__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package; a repository further up is not its own
        return {}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return {"commit": subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}
    return {}
