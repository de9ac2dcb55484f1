"""Command ``sgp run BENCHMARK`` or ``sgp run FILE.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sgp.benchmarks import BENCHMARKS
from sgp.cli.arguments import Exit, Parser, asks_for_help, exit_on, flag, write_option
from sgp.cli.importing import import_files
from sgp.experiments.config import (
    CHOICES,
    GROUPS,
    Config,
    check_complete,
    configure,
    explain_unknown_setting,
    find_groups,
    read_recorded,
    read_yaml,
)
from sgp.registry import UnknownName, unknown

# Names of files in a run's folder.
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


CHOICE_PARSER = Parser()
for _name in CHOICES:
    CHOICE_PARSER.add_argument(write_option(_name))
CHOICE_PARSER.add_argument("--import", action="append", default=[])


@dataclass(frozen=True)
class Place:
    """Folders that a run reads from and writes to."""

    data: Path | None = None
    """Folder with the data sets; by default $SGP_DATA."""
    out: Path = Path("runs")
    """Folder that contains the run's folder."""
    name: str | None = None
    """Name of the run's folder; by default benchmark, method, preset and seed."""
    resume: bool = flag()
    """Resume a run that was stopped."""
    import_: tuple[Path, ...] = ()
    """Python file that registers your own method, network or benchmark; can be given several times."""

    def __post_init__(self) -> None:
        """Check that the name is the name of one folder."""
        if self.name is not None and (Path(self.name).name != self.name or self.name == ".."):
            raise ValueError(f"--name must be the name of one folder, got {self.name!r}; its parent folder is --out")

    def find_folder(self, config: Config[Any]) -> Path:
        """Return the folder of a run."""
        return self.out.expanduser() / (self.name or config.name)


@dataclass(frozen=True)
class Request:
    """Parsed command line.

    Attributes:
        config: Config of the run.
        place: Folders that the run reads from and writes to.
    """

    config: Config[Any]
    place: Place


def main(arguments: list[str]) -> int:
    """Learn a task stream."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    request = parse_request(arguments)
    # This imports torch, so mistakes in the arguments are reported before it.
    from sgp.cli.launch import launch

    return launch(request.config, request.place)


def parse_request(arguments: Sequence[str]) -> Request:
    """Parse a command line.

    Raises:
        Exit: The help was printed, or a name or a value is wrong; the message says what is accepted.
    """
    with exit_on(ValueError, ImportError):
        target, *rest = arguments
        if target.startswith("-"):
            raise ValueError(f"name a benchmark, a config file or a run's folder before {target}")
        # The choices determine which other options exist, so they are parsed first.
        chosen, rest = CHOICE_PARSER.parse_known_args(rest)
        scripts = tuple(map(Path, vars(chosen).pop("import")))
        import_files(scripts)
        values, place = _read_target(target, vars(chosen), is_resumed="--resume" in rest)
        benchmark, method = values["benchmark"], values["method"]
        wants_help = asks_for_help(rest)
        usual = vars(Place()) | configure(**values).flat() if wants_help else None
        choices = ", ".join(f"{name} {values.get(name, 'paper')}" for name in ("preset", "recipe"))
        parser = Parser(f"sgp run {target} [OPTIONS]", f"{method} on {benchmark}, {choices}.")
        groups = find_groups(benchmark, method)
        parser.add_fields("where", Place, usual)
        parser.add_fields(f"settings of {method}", groups["method_settings"], usual)
        parser.add_fields(f"settings of {benchmark}", groups["benchmark_settings"], usual)
        parser.add_fields("training", groups["trainer"], usual)
        parser.add_fields("run", Config, usual, leave_out=(*CHOICES, *GROUPS))
        if wants_help:
            parser.print_help()
            raise Exit(0)
        known = [*parser.hints, *CHOICES]
        given = parser.parse(rest, partial(_explain_unknown, benchmark=benchmark, method=method, known=known))
        place |= {name: given.pop(name) for name in vars(Place()) if name in given}
        return Request(configure(**values | given), Place(**place, import_=scripts))


def _explain_unknown(option: str, benchmark: str, method: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown option, which suggests near options."""
    return explain_unknown_setting(option.lstrip("-").replace("-", "_"), benchmark, method, known, write_option)


def _read_target(target: str, choices: dict[str, str], *, is_resumed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the place of a target: a benchmark, a config file or a run's folder.

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
        # The file of a run records how it was run, whatever the paper's settings are now.
        is_of_run = file.name == CONFIG and (file.parent / VERSIONS).is_file()
        given = read_recorded(file).flat() if is_of_run else read_yaml(file)
        values = check_complete(file, given | choices)
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
    """Raise if a preset or recipe would only change a label, because the file sets every value itself."""
    for name in ("preset", "recipe"):
        if values.get(name, "paper") != given.get(name, "paper"):
            choices = values[name], given.get(name, "paper")
            mine, theirs = (configure(**(values | {name: choice})).flat() for choice in choices)
            if {**mine, name: None} == {**theirs, name: None}:
                raise ValueError(
                    f"{file} has every value itself, so --{name} {values[name]} would change nothing: use "
                    f"sgp run {values['benchmark']} --{name} {values[name]}"
                )
