"""Read damaged files: each must load normally or be refused with a one-line error, and nothing may be executed."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import yaml
from data.make_memory import inputs, memory_of, network
from experiments.small import Stop, small
from experiments.small import run as run_config
from rl import signs
from rl.small import run as run_games
from rl.small import small as small_games
from torch import Tensor, nn

import sgp
from bench.soak.calls import Outcome, call
from bench.soak.mutate import mutate_bytes, mutate_json, mutate_lines, mutate_value
from sgp import storage
from sgp.benchmarks import BENCHMARKS
from sgp.cli.arguments import Exit
from sgp.cli.run import parse_request
from sgp.experiments.config import configure
from sgp.methods import METHODS

MEMORIES, CONFIGS, FOLDERS = 400, 300, 300
# The quick campaign reads one in QUICK_SHARE of the files. A report is written for one in REPORTS of the folders.
QUICK_SHARE, REPORTS = 20, 10
# Audit events of Python that reading a file must never raise.
EXECUTION = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn")
# Aliases that a reader must not expand: ten levels of ten.
BOMB = "".join(
    f"{level}: &{level} [{', '.join([f'*{before}'] * 10) if before else 1}]\n"
    for before, level in zip(["", *"abcdefghi"], "abcdefghij", strict=True)
)
# Texts that make a careless reader execute something, exhaust the memory, or recurse.
TAGS = (
    "benchmark: !!python/object/apply:pathlib.Path.touch [{path}]\nmethod: sgp\n",
    "!!python/object/apply:os.system ['touch {path}']\n",
    "benchmark: digits\nmethod: sgp\nseed: &a [*a]\n",
    BOMB,
    "[" * 3000,
    "benchmark: digits\nmethod: sgp\n? [a, b]\n: 1\n",
    "benchmark: digits\nmethod: sgp\nseed: !!binary aGVsbG8=\n",
    "benchmark: digits\nmethod: sgp\nseed: 2026-01-01\n",
    "benchmark: digits\nmethod: sgp\n<<: 3\n",
)


class Proof:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def run(folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """Damage memory files, configs and folders of runs, and read them.

    Args:
        folder: Empty folder.
        quick: Whether to damage a few files only.
        seed: Seed of the damage.

    Returns:
        Figures of the campaign.
    """
    parts = {
        "memory files": (MEMORIES, read_memories),
        "configs": (CONFIGS, read_configs),
        "run folders": (FOLDERS, read_folders),
    }
    faults: list[str] = []
    counts: dict[str, dict[str, int]] = {}
    with _watch_execution() as executed:
        for name, (count, read) in parts.items():
            place = folder / name.replace(" ", "-")
            place.mkdir()
            outcomes = read(place, random.Random(f"{seed} {name}"), Proof(folder / "proof"))
            found = list(islice(outcomes, count // QUICK_SHARE if quick else count))
            accepted = sum(outcome.is_accepted for outcome in found)
            counts[name] = {"accepted": accepted, "refused": len(found) - accepted}
            faults += [f"{name} {n}, {each.subject}: {each.fault}" for n, each in enumerate(found) if each.fault]
    faults += [f"{event} while files were read" for event in executed]
    if (folder / "proof").exists():
        faults.append("a file was executed")
    return {"files": sum(sum(each.values()) for each in counts.values()), **counts, "faults": faults}


def read_memories(folder: Path, generator: random.Random, proof: Proof) -> Iterator[Outcome]:
    """Damage the files of two memories repeatedly, and load each with `load` and with `from_file`."""
    path = folder / "memory.safetensors"
    models: list[tuple[nn.Module, Any]] = [(network(), inputs(0)), (Texts(), torch.arange(60).view(12, 5) % 20)]
    memories = []
    for model, batch in models:
        memory = memory_of(model)
        memory.update([batch])
        memory.save(path)
        memories.append((memory, path.read_bytes(), storage.read(path), storage.digest(memory.state_dict())))
    while True:
        memory, whole, state, digest = generator.choice(memories)
        kind = generator.choice(("bytes", "header", "value", "value", "value", "pickle"))
        if kind == "bytes":
            path.write_bytes(mutate_bytes(whole, generator))
        elif kind == "header":
            size = 8 + int.from_bytes(whole[:8], "little")
            header = mutate_json(whole[8:size], generator)
            path.write_bytes(len(header).to_bytes(8, "little") + header + whole[size:])
        elif kind == "value":  # with a digest that fits, as another program would write it
            write_state(path, mutate_value(state, generator))
        else:
            path.write_bytes(pickle.dumps(proof))
        yield _load(memory, path, kind, digest)


def _load(memory: sgp.GradientMemory, path: Path, damage: str, digest: str) -> Outcome:
    """Load a file into a memory and into a new one, and restore the memory."""
    state = copy.deepcopy(memory.state_dict())
    accepted = False
    ways: dict[str, Callable[[], Any]] = {
        "load": lambda: memory.load(path),
        "from_file": lambda: sgp.GradientMemory.from_file(memory.model, path).summary(),
    }
    for way, load in ways.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load()
            accepted = True
        except (ValueError, FileNotFoundError) as error:
            if "\n" in str(error):
                return Outcome(damage, False, f"{way}: a message of several lines: {error}")
            if way == "load" and storage.digest(memory.state_dict()) != digest:
                memory.load_state_dict(state)
                return Outcome(damage, False, f"{way}: the memory has changed, but: {error}")
        except Exception as error:
            memory.load_state_dict(state)
            return Outcome(damage, False, f"{way}: {type(error).__name__}: {error}")
    memory.load_state_dict(state)
    return Outcome(damage, accepted)


def write_state(path: Path, state: Any) -> None:
    """Write a damaged state with a digest that fits; a state that cannot be written becomes an empty file."""
    try:
        storage.write(path, state)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        path.write_bytes(b"")


def read_configs(folder: Path, generator: random.Random, proof: Proof) -> Iterator[Outcome]:
    """Damage config files repeatedly, and read each as the config of a run and of a sweep."""
    path = folder / "config.yaml"
    methods = list(METHODS)
    grid = {"benchmark": "digits", "method": ["sgp", "gpm"], "seed": [0, 1], "lr": [0.1, 0.01]}
    while True:
        values: Any = configure("digits", generator.choice(methods)).flat()
        if generator.random() < 0.3:
            values = grid
        text = yaml.safe_dump(values, sort_keys=False).encode()
        kind = generator.choice(("bytes", "lines", "value", "value", "value", "tag"))
        if kind == "value":
            text = yaml.safe_dump(mutate_value(values, generator), sort_keys=False).encode()
        elif kind == "tag":
            text = generator.choice(TAGS).format(path=proof.path).encode()
        else:
            text = (mutate_bytes if kind == "bytes" else mutate_lines)(text, generator)
        path.write_bytes(text)
        planned = call(["sweep", str(path), "--plan"])
        yield planned if planned.fault else _parse(path, kind)


def _parse(path: Path, damage: str) -> Outcome:
    """Read a config as `sgp run` does, without running it."""
    try:
        parse_request([str(path)])
    except Exit as end:
        return Outcome(damage, False, f"a message of several lines: {end}" if "\n" in str(end) else "")
    except Exception as error:
        return Outcome(damage, False, f"{type(error).__name__}: {error}")
    return Outcome(damage, True)


def read_folders(folder: Path, generator: random.Random, proof: Proof) -> Iterator[Outcome]:
    """Damage a file of a run's folder repeatedly, and show, resume and report the run."""
    wholes = list(_make_runs(folder))
    path = folder / "run"
    for number in count():
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(generator.choice(wholes), path)
        file = generator.choice(sorted(file for file in path.rglob("*") if file.is_file()))
        damage = f"{file.relative_to(path)}: {_damage_file(file, generator, proof)}"
        commands = [["show", str(path)], ["run", str(path), "--resume"]]
        if number % REPORTS == 0:
            commands.append(["report", str(path), "--out", str(folder / "report")])
        outcomes = [call(command) for command in commands]
        faults = [outcome.fault for outcome in outcomes if outcome.fault]
        yield Outcome(damage, all(outcome.is_accepted for outcome in outcomes), "; ".join(faults))


def _damage_file(file: Path, generator: random.Random, proof: Proof) -> str:
    """Damage a file, and return the kind of damage."""
    data = file.read_bytes()
    kinds = ["bytes", "lines", "remove", "pickle", "folder"]
    kinds += ["value"] * 6 if file.suffix in (".json", ".jsonl", ".yaml", ".safetensors") else []
    kind = generator.choice(kinds)
    if kind == "value" and file.suffix == ".safetensors":
        write_state(file, mutate_value(storage.read(file), generator))
    elif kind == "value" and file.suffix == ".yaml":
        file.write_text(
            yaml.safe_dump(mutate_value(yaml.safe_load(data), generator), sort_keys=False), encoding="utf-8"
        )
    elif kind == "value":
        file.write_bytes(mutate_json(data, generator))
    elif kind in ("bytes", "lines"):
        file.write_bytes((mutate_bytes if kind == "bytes" else mutate_lines)(data, generator))
    elif kind == "pickle":
        file.write_bytes(pickle.dumps(proof))
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return kind


def _make_runs(folder: Path) -> Iterator[Path]:
    """Make a finished run and a stopped one with each trainer, and yield their folders."""

    def stop(event: str, values: dict[str, Any]) -> None:
        if event in ("epoch", "update") and (values["task"], values[event]) == (1, 2):
            raise Stop

    BENCHMARKS._known["signs"] = signs.BENCHMARK
    for method in ("sgp", "trgp"):
        config = small(method, tasks=2, threads=1)
        run_config(folder / method, config)
        yield folder / method
        with contextlib.suppress(Stop):
            run_config(folder / f"{method}-stopped", config, stop)
        yield folder / f"{method}-stopped"
    games = small_games(threads=1)
    run_games(folder / "games", games)
    yield folder / "games"
    with contextlib.suppress(Stop):
        run_games(folder / "games-stopped", games, stop)
    yield folder / "games-stopped"


@contextlib.contextmanager
def _watch_execution() -> Iterator[list[str]]:
    """Collect the audit events inside the context by which content of a file would be executed."""
    executed: list[str] = []
    is_watching = True

    def watch(event: str, values: tuple[Any, ...]) -> None:
        if is_watching and event in EXECUTION:
            executed.append(f"{event} {values}")

    sys.addaudithook(watch)
    yield executed
    is_watching = False  # a hook cannot be removed


class Texts(nn.Module):
    """An embedding, a recurrent layer, and an output layer with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 20)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.recurrent(self.embedding(x))[0]
        logits: Tensor = self.out(hidden[:, -1])
        return logits
