"""The command ``sgp``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import sgp

# Modules of the extra "benchmarks" that the command needs, by the names they are installed under.
NEEDED = {"tyro": "tyro", "sklearn": "scikit-learn", "yaml": "PyYAML"}
# Each is a module of this room, imported when it is asked for.
COMMANDS = {
    "demo": "demo",
    "run": "run",
    "sweep": "sweep",
    "list": "listing",
    "show": "show",
    "report": "report",
    "reproduce": "reproduce",
    "data": "data",
}
OVERVIEW = """usage: sgp COMMAND [OPTIONS]

Continual learning by scaled gradient projection.

  sgp demo                    finetuning, GPM and SGP side by side, in about a minute
  sgp run BENCHMARK           learn a stream of tasks: sgp run digits --method sgp
  sgp run FILE.yaml           the same from a config file
  sgp sweep FILE.yaml         a grid of runs, on the cores of this machine or on Ray
  sgp list [KIND]             the benchmarks, methods and networks there are
  sgp show RUN ...            accuracies and metrics of finished and unfinished runs
  sgp report RUN ...          the paper's tables and figures for these runs, as a page
  sgp reproduce [TABLE ...]   the paper's tables beside ours; runs what is missing in a table
  sgp data get NAME           download a data set
  sgp data check DIR          what is there, complete or damaged

`sgp COMMAND --help` tells the options, `sgp --version` the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, or those of the process; its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # Before anything optional is imported: a bare install must be able to tell what it is.
    if arguments == ["--version"]:
        print(f"sgp {sgp.__version__}")
        return 0
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        print(f'sgp needs {" and ".join(missing)}: pip install "sgp-torch[benchmarks]"', file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW)
        return 0

    from sgp.registry import unknown

    name, *rest = arguments
    if name not in COMMANDS:
        print(f"sgp: {unknown('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    command: Callable[[list[str]], int] = import_module(f"sgp.cli.{COMMANDS[name]}").main
    try:
        return command(rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has left, as `head` does
        sys.stderr.close()
        return 141
