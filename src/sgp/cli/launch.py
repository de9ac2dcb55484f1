"""Run a config in this process: load its tasks, build its trainer, and show its progress."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.benchmarks.datasets.images import DataError
from sgp.cli.arguments import exit_on
from sgp.cli.interrupt import INTERRUPTED, raise_on_interrupt
from sgp.cli.show import print_summary
from sgp.experiments.callbacks import Callback, Display, make_tensorboard_callbacks
from sgp.experiments.config import Config
from sgp.experiments.experiment import Experiment
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.summary import read_summary
from sgp.experiments.supervised import SupervisedTrainer
from sgp.rl import load_games
from sgp.rl.settings import GameError

if TYPE_CHECKING:
    from sgp.cli.run import Place


def launch(config: Config[Any], place: Place) -> int:
    """Run a config from its beginning or from its checkpoint, and return the exit code.

    Args:
        config: Config of the run.
        place: Where it reads from and writes to.
    """
    raise_on_interrupt()
    with exit_on_failure():
        RunFolder.check_unused(place.find_folder(config), resume=place.resume)
        return _run(config, load_stream(config, place.data), place)


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """End the command with exit code 1 for data and runs that fail, and with 2 for a mistake in the settings."""
    with exit_on(ValueError, ImportError), exit_on(DataError, RunError, GameError, code=1):
        yield


def load_stream(config: Config[Any], data: Path | None) -> Any:
    """Load the tasks or the games of a config.

    Args:
        config: Config of the run.
        data: Folder with the data sets; None for $SGP_DATA.
    """
    benchmark = BENCHMARKS[config.benchmark]
    if isinstance(benchmark, Benchmark):
        return benchmark.stream(config.benchmark_settings, data, config.seed)
    return load_games(config.benchmark, config.benchmark_settings)


def build_trainer(config: Config[Any], stream: Any, folder: RunFolder, *callbacks: Callback) -> Experiment:
    """Build the trainer of a config.

    Raises:
        ValueError: The method, the network and the tasks do not go together.
    """
    if not config.is_game:
        return SupervisedTrainer(config, stream, folder, *callbacks)
    # Games need optional packages, of which load_stream has said what is missing.
    from sgp.experiments.ppo import PPOTrainer

    return PPOTrainer(config, stream, folder, *callbacks)


def _run(config: Config[Any], stream: Any, place: Place) -> int:
    console, path, names = Console(), place.find_folder(config), list(stream.names)
    # A batch system sends SIGTERM before it ends a job.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resume = f"resume with: {_format_resume(path, place)}"
    kept = f"the last checkpoint is kept, {resume}"
    try:
        with RunFolder.begin(path, config, resume=place.resume) as folder:
            config = folder.read_config()
            with Display(console, config, names) as display:
                trainer = build_trainer(config, stream, folder, display, *make_tensorboard_callbacks(path))
                heading = (
                    f"{path}: {config.method} on {config.benchmark}, {len(names)} tasks{folder.describe_progress()}"
                )
                console.print(heading, highlight=False, markup=False, soft_wrap=True)
                for note in folder.warnings:
                    console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
                trainer.run()
            print_summary(console, str(path), read_summary(folder))
    except KeyboardInterrupt:
        console.print(f"Stopped; {resume}", highlight=False, markup=False, soft_wrap=True)
        return INTERRUPTED
    except SystemExit as error:  # rich ends a process whose stdout was closed, without a message
        raise RunError(f"stdout was closed; {kept}") from error
    except (OSError, GameError) as error:
        raise RunError(f"{error}; {kept}") from error
    return 0


def _format_resume(path: Path, place: Place) -> str:
    """Return the command that resumes a run."""
    data = [] if place.data is None else ["--data", str(place.data)]
    imports = [word for script in place.import_ for word in ("--import", str(script))]
    return shlex.join(["sgp", "run", str(path), "--resume", *data, *imports])
