"""Command ``sgp run BENCHMARK`` or ``sgp run FILE.yaml``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sgp.benchmarks import BENCHMARKS
from sgp.cli.arguments import ArgumentError, Option, asks_for_help, flag, format_help, list_options, parse
from sgp.cli.importing import import_file
from sgp.experiments.config import (
    CHOICES,
    GROUPS,
    Config,
    configure,
    explain_unknown_setting,
    find_groups,
    read_recorded,
    read_yaml,
)
from sgp.registry import UnknownName, unknown

# Files of a run's folder.
CONFIG, VERSIONS = "config.yaml", "versions.json"
USAGE = """usage: sgp run BENCHMARK|FILE.yaml|RUN [--method NAME] [OPTIONS]

  sgp run digits --method sgp --seed 1
  sgp run split-cifar100 --method gpm --preset reference --data DIR
  sgp run atari --method sgp --games kung-fu-master,boxing --device cuda
  sgp run runs/digits-sgp-paper-seed1 --resume

--method NAME   one of `sgp list methods`; default: sgp
--preset NAME   paper: as the paper's text says; reference: as its published
                code does; corrected: with the mistakes of both fixed;
                default: paper
--recipe NAME   paper: the paper's training; fast: fewer epochs with a cosine
                schedule and weight averaging; default: paper
--import FILE   Python file that registers your own method, network or
                benchmark; can be given several times

`sgp run BENCHMARK --method NAME --help` shows the settings and their values."""


@dataclass(frozen=True)
class Place:
    """Where a run reads from and writes to."""

    data: Path | None = None
    """Folder with the data sets; by default $SGP_DATA."""
    out: Path = Path("runs")
    """Folder that contains the run's folder."""
    name: str | None = None
    """Name of the run's folder; by default benchmark, method, preset and seed."""
    resume: bool = flag()
    """Resume a run that was stopped."""

    def __post_init__(self) -> None:
        """Check that the name is the name of one folder."""
        if self.name is not None and (Path(self.name).name != self.name or self.name == ".."):
            raise ValueError(f"--name must be the name of one folder, got {self.name!r}; its parent folder is --out")

    def find_folder(self, config: Config[Any]) -> Path:
        """Return the folder of a run."""
        return self.out.expanduser() / (self.name or config.name)


@dataclass(frozen=True)
class Request:
    """Content of a command line.

    Attributes:
        config: Config of the run.
        place: Where it reads from and writes to.
        scripts: Files that were imported for it.
    """

    config: Config[Any]
    place: Place
    scripts: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """Learn a task stream."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        request = parse_request(arguments)
    except (ValueError, ImportError) as error:
        print(f"sgp run: {error}", file=sys.stderr)
        return 2
    if request is None:
        return 0
    # This imports torch: mistakes in the arguments are reported before.
    from sgp.cli.launch import launch

    return launch(request.config, request.place, request.scripts)


def parse_request(arguments: Sequence[str]) -> Request | None:
    """Parse a command line, or print its help and return None.

    Raises:
        ValueError: A name or a value is wrong; the message says what is accepted.
    """
    target, *rest = arguments
    if target.startswith("-"):
        raise ArgumentError(f"name a benchmark, a config file or a run's folder before {target}")
    choices, scripts, rest = _split_choices(rest)
    for script in scripts:
        import_file(script)
    values, place = _read_target(target, choices, is_resumed="--resume" in rest)
    groups = find_groups(values["benchmark"], values["method"])
    options = {
        "where": list_options(Place),
        f"settings of {values['method']}": list_options(groups["method_settings"]),
        f"settings of {values['benchmark']}": list_options(groups["benchmark_settings"]),
        "training": list_options(groups["trainer"]),
        "run": list_options(groups["config"], leave_out=(*CHOICES, *GROUPS)),
    }
    if asks_for_help(rest):
        config = configure(**values)
        description = f"{config.method} on {config.benchmark}, preset {config.preset}, recipe {config.recipe}."
        print(format_help(f"sgp run {target} [OPTIONS]", description, options, vars(Place()) | config.flat()))
        return None
    every = [option for group in options.values() for option in group]
    given = parse(every, rest, partial(_explain_unknown, values=values, options=every))
    own = {option.name for option in options["where"]}
    config = configure(**values | {name: value for name, value in given.items() if name not in own})
    return Request(config, Place(**place | {name: given[name] for name in own & given.keys()}), tuple(scripts))


def _explain_unknown(name: str, values: Mapping[str, Any], options: Sequence[Option]) -> str:
    """Return the error message for an unknown option; a near option of any kind is suggested."""
    known = [option.name for option in options]
    return explain_unknown_setting(
        name, values["benchmark"], values["method"], [*known, *CHOICES, "import"], write_option
    )


def write_option(name: str) -> str:
    """Return a setting as an option: "test_batch" is --test-batch."""
    return f"--{name.replace('_', '-')}"


def _read_target(target: str, choices: dict[str, str], *, is_resumed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the place that a target stands for: a benchmark, a config file or a run's folder.

    Args:
        target: First word of the command line.
        choices: Values of --method and the other choices.
        is_resumed: Whether a run is to be resumed.
    """
    path = Path(target)
    # The name of a benchmark has precedence over a folder of that name.
    if target not in BENCHMARKS and (target.endswith((".yaml", ".yml")) or path.is_dir()):
        file = path / CONFIG if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"there is no file {str(file)!r}")
        place: dict[str, Any] = {}
        if path.is_dir():
            path = path.resolve() if path.name in ("", "..") else path
            place = {"out": path.parent, "name": path.name}
        # The file of a run says how it was run, whatever the paper's settings are now.
        is_of_run = file.name == CONFIG and (file.parent / VERSIONS).is_file()
        given = read_recorded(file).flat() if is_of_run else read_yaml(file)
        values = given | choices
        for name in ("benchmark", "method"):
            if name not in values:
                raise ValueError(f"{file} does not say which {name}")
        _check_idle_choices(file, given, values)
        return values, place
    if target not in BENCHMARKS:
        if len(path.parts) > 1 or is_resumed:
            raise ValueError(f"there is no folder {target!r} of a run, and no benchmark of that name")
        raise UnknownName(unknown("benchmark", target, BENCHMARKS))
    if "benchmark" in choices:
        raise ValueError(f"--benchmark goes with a config file; here the benchmark is {target!r}")
    return {"benchmark": target, "method": "sgp"} | choices, {}


def _check_idle_choices(file: Path, given: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise if a preset or recipe would change a label only, because the file has all values of its own."""
    for name in ("preset", "recipe"):
        if values.get(name, "paper") != given.get(name, "paper"):
            choices = values[name], given.get(name, "paper")
            mine, theirs = (configure(**(values | {name: choice})).flat() for choice in choices)
            if {**mine, name: None} == {**theirs, name: None}:
                raise ValueError(
                    f"{file} has every value itself, so --{name} {values[name]} would change nothing: use "
                    f"sgp run {values['benchmark']} --{name} {values[name]}"
                )


def _split_choices(arguments: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the choices, such as --method, the files to import, and the other arguments.

    Choices decide which other options there are, so they are parsed first.
    """
    names = {f"--{name}": name for name in (*CHOICES, "import")}
    choices: dict[str, str] = {}
    scripts, rest = [], []
    left = iter(arguments)
    for argument in left:
        option, equals, value = argument.partition("=")
        if option not in names:
            rest.append(argument)
            continue
        if not equals:
            value = next(left, "")
        if not value or value.startswith("--"):
            raise ArgumentError(f"{option} needs a value")
        if option == "--import":
            scripts.append(value)
        else:
            choices[names[option]] = value
    return choices, scripts, rest
