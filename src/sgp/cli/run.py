"""``sgp run BENCHMARK`` and ``sgp run FILE.yaml``"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro
from rich.console import Console

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.benchmarks.datasets.images import DataError
from sgp.benchmarks.stream import Stream, Task
from sgp.cli.show import print_run
from sgp.experiments.config import CHOICES, AnyConfig, Config, GameConfig, configure, read_yaml, recorded
from sgp.experiments.display import Display
from sgp.experiments.experiment import Callback
from sgp.experiments.folder import CONFIG, VERSIONS, RunError, RunFolder
from sgp.experiments.supervised import SupervisedTrainer
from sgp.experiments.tensorboard import make_tensorboard_callbacks
from sgp.rl import load_games
from sgp.rl.settings import GameError

if TYPE_CHECKING:
    from sgp.experiments.game_display import GameDisplay
    from sgp.experiments.ppo import PPOTrainer

# What a shell makes of a process that was interrupted.
INTERRUPTED = 130
USAGE = """usage: sgp run BENCHMARK|FILE.yaml|RUN [--method NAME] [--preset NAME] [--recipe NAME] [OPTIONS]

  sgp run digits --method sgp --seed 1
  sgp run split-cifar100 --method gpm --preset reference --data DIR --epochs 5
  sgp run atari --method sgp --games kung-fu-master,boxing --steps 200_000
  sgp run runs/digits-sgp-paper-seed1 --resume

--method   one of `sgp list methods` (sgp)
--preset   paper: what the text says; reference: what the published code does; corrected: what is right (paper)
--recipe   paper: its training; fast: a cosine rate and averaged weights in fewer epochs (paper)
--import   a Python file of yours that registers a method, network or benchmark

`sgp run BENCHMARK --method NAME --help` tells the options of that method there, with their values."""


@dataclass(frozen=True)
class Place:
    """Where a run reads from and writes to."""

    data: Path | None = None
    """Folder of the data sets; without it $SGP_DATA."""
    out: Path = Path("runs")
    """Folder that the run's own folder goes to."""
    name: str | None = None
    """Of the run's folder; without it benchmark, method, preset and seed."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with a run that was stopped."""

    def __post_init__(self) -> None:
        if self.name is not None and (Path(self.name).name != self.name or self.name == ".."):
            raise ValueError(f"name must be the name of one folder, got {self.name!r}; --out says where it goes")

    def folder(self, config: AnyConfig) -> Path:
        """Of a run."""
        return self.out.expanduser() / (self.name or config.name)


@dataclass(frozen=True)
class _Arguments:
    place: Place
    config: Config


@dataclass(frozen=True)
class _GameArguments:
    place: Place
    config: GameConfig


@dataclass(frozen=True)
class Work:
    """What a run does, with everything in its hands that it needs.

    Attributes:
        names: of its tasks.
        learner: what learns them, for the run's config, its folder and who is told of it.
        display: shows a person how it goes, on a console.
    """

    names: list[str]
    learner: Callable[..., SupervisedTrainer | PPOTrainer]
    display: Callable[[Console], Display | GameDisplay]


def main(arguments: list[str]) -> int:
    """Learn a stream of tasks."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        prepared = prepare(arguments)
    except (ValueError, ImportError, RunError, GameError) as error:
        return print_error(error)
    try:
        return start(*prepared)
    except RunError as error:
        return print_error(error)


def print_error(error: Exception) -> int:
    """Print what is wrong, and return the exit status."""
    print(f"sgp run: {error}", file=sys.stderr)
    return 1 if isinstance(error, DataError | RunError | GameError) else 2


def prepare(arguments: Sequence[str]) -> tuple[Place, AnyConfig, Work, list[str]]:
    """What a command line asks for: bad settings and missing data show before a folder is made."""
    place, config, scripts = parse(arguments)
    RunFolder.check_unused(place.folder(config), resume=place.resume)
    work = work_of(config, place.data)
    work.learner(config, RunFolder(place.folder(config)))
    return place, config, work, scripts


def work_of(config: AnyConfig, data: Path | None) -> Work:
    """What a run does; its network has been built, and its data have been read, or its games tried."""
    benchmark = BENCHMARKS[config.benchmark]
    if isinstance(config, Config):
        assert isinstance(benchmark, Benchmark)
        if benchmark.shape is not None:
            # No task is asked for: this is to hear of settings that do not go with the network.
            empty = Stream([], *benchmark.shape(config.benchmark_settings), make=_no_task)
            SupervisedTrainer(config, empty, RunFolder(Path()))
        tasks = benchmark.stream(config.benchmark_settings, data, config.seed)

        def learner(config: Config, folder: RunFolder, *callbacks: Callback) -> SupervisedTrainer:
            return SupervisedTrainer(config, tasks, folder, *callbacks)

        return Work(list(tasks.names), learner, lambda console: Display(console, config, list(tasks.names)))
    games = load_games(config.benchmark, config.benchmark_settings)
    # After load_games has said what is missing.
    from sgp.experiments.game_display import GameDisplay
    from sgp.experiments.ppo import PPOTrainer

    def game_learner(config: GameConfig, folder: RunFolder, *callbacks: Callback) -> PPOTrainer:
        return PPOTrainer(config, games, folder, *callbacks)

    return Work(games.names, game_learner, lambda console: GameDisplay(console, config, games.names))


def _no_task(position: int) -> Task:
    raise IndexError(f"there is no task {position} before the data are read")


def parse(arguments: Sequence[str]) -> tuple[Place, AnyConfig, list[str]]:
    """Place and config of a command line, and the files that it has imported.

    The names that decide which others there are come first; the rest is typed, with the paper's values as defaults.

    Raises:
        ValueError: a name or a value is wrong; the message has what would be accepted. Mistakes in typed options end
            the process with status 2 and a message.
    """
    target, *rest = arguments
    if target.startswith("-"):
        raise ValueError(f"say what to run before {target}: a benchmark, a config file or a run's folder")
    chosen, rest = _split_choices(rest)
    scripts = chosen.pop("import", [])
    for script in scripts:
        import_file(script)
    values = {name: given[-1] for name, given in chosen.items()}
    path = Path(target)
    place = Place()
    # A benchmark's name is one also where a folder is called so.
    if target not in BENCHMARKS and (target.endswith((".yaml", ".yml")) or path.is_dir()):
        file = path / CONFIG if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"there is no file {str(file)!r}")
        if path.is_dir():
            path = path.resolve() if path.name in ("", "..") else path
            place = Place(out=path.parent, name=path.name)
        # What a run has written says how it was, whatever is usual now.
        is_of_run = file.name == CONFIG and (file.parent / VERSIONS).is_file()
        given = recorded(file).flat() if is_of_run else read_yaml(file)
        values = given | values
        for name in ("benchmark", "method"):
            if name not in values:
                raise ValueError(f"{file} does not say which {name}")
        _refuse_idle_choice(file, given, values)
    else:
        if target not in BENCHMARKS and (len(path.parts) > 1 or "--resume" in rest):
            raise ValueError(f"there is no folder {target!r} of a run, and no benchmark of that name")
        if "benchmark" in values:
            raise ValueError(f"--benchmark goes with a config file; here the benchmark is {target!r}")
        values = {"benchmark": target, "method": "sgp"} | values
    return *_typed(place, configure(**values), target, rest), scripts


def _refuse_idle_choice(file: Path, given: dict[str, Any], values: dict[str, Any]) -> None:
    """A preset or recipe is a set of values; where the file has them all, another one would change its label only."""
    for name in ("preset", "recipe"):
        if values.get(name, "paper") != given.get(name, "paper"):
            choices = values[name], given.get(name, "paper")
            mine, theirs = (configure(**(values | {name: choice})).flat() for choice in choices)
            if {**mine, name: None} == {**theirs, name: None}:
                raise ValueError(
                    f"{file} gives every value itself, so --{name} {values[name]} would change nothing: begin with "
                    f"sgp run {values['benchmark']} --{name} {values[name]}"
                )


def import_file(script: str) -> None:
    """Run a file of the user's, as a module that stays: the types of its settings are looked up there later."""
    if not Path(script).is_file():
        raise ValueError(f"--import: there is no file {script!r}")
    spec = spec_from_file_location(f"sgp_import_{Path(script).stem}", script)
    if spec is None or spec.loader is None:
        raise ValueError(f"--import: {script!r} is not a Python file")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)


def _split_choices(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Values of --method, --preset, --recipe and --import, and what is left of the arguments."""
    names = {f"--{name}": name for name in (*CHOICES, "import")}
    chosen: dict[str, list[str]] = {}
    rest = []
    given = iter(arguments)
    for argument in given:
        flag, equals, value = argument.partition("=")
        if flag not in names:
            rest.append(argument)
            continue
        if not equals:
            value = next(given, "")
        if not value or value.startswith("--"):
            raise ValueError(f"{flag} needs a value")
        chosen.setdefault(names[flag], []).append(value)
    return chosen, rest


def _typed(place: Place, config: AnyConfig, target: str, arguments: Sequence[str]) -> tuple[Place, AnyConfig]:
    """What the remaining arguments change; flags are the names of settings, whatever group they belong to."""
    given: _Arguments | _GameArguments
    given = _Arguments(place, config) if isinstance(config, Config) else _GameArguments(place, config)
    parsed = tyro.cli(
        type(given),
        default=given,
        args=list(arguments),
        prog=f"sgp run {target}",
        description=f"{config.method} on {config.benchmark}, preset {config.preset}, recipe {config.recipe}.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed.place, parsed.config


def start(place: Place, config: AnyConfig, work: Work, scripts: Sequence[str] = ()) -> int:
    """Run a config, from its beginning or from its checkpoint.

    Args:
        place: where.
        config: of the run.
        work: what it does.
        scripts: that it needs imported to be taken up again.
    """
    console = Console()
    path = place.folder(config)
    # A batch system that ends a job asks first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    data = [] if place.data is None else ["--data", str(place.data)]
    imports = [word for script in scripts for word in ("--import", script)]
    again = "go on with: " + shlex.join(["sgp", "run", str(path), "--resume", *data, *imports])
    kept = f"what was learned until the last checkpoint is kept, {again}"
    try:
        with RunFolder.begin(path, config, resume=place.resume, threads=torch.get_num_threads()) as folder:
            heading = (
                f"{path}: {config.method} on {config.benchmark}, {len(work.names)} tasks{folder.describe_progress()}"
            )
            console.print(heading, highlight=False, markup=False, soft_wrap=True)
            for note in folder.warnings:
                console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
            whole = folder.read_config()
            torch.set_num_threads(whole.threads)
            with work.display(console) as display:
                work.learner(whole, folder, display, *make_tensorboard_callbacks(path)).run()
            print_run(console, str(path), folder)
    except KeyboardInterrupt:
        console.print(f"Stopped; {again}", highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    except SystemExit as error:  # rich ends a process whose output goes nowhere, without a word
        raise RunError(f"nobody reads the output; {kept}") from error
    except (OSError, GameError) as error:
        raise RunError(f"{error}; {kept}") from error
    return 0
