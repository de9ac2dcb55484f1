"""The command ``sgp``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import sgp
from sgp.cli.interrupt import INTERRUPTED, exit_on_interrupt

# Modules of the extra "benchmarks" that the command needs, by the names they are installed under.
NEEDED = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
# Each subcommand is a module of this package, imported when it is asked for.
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

  sgp demo                 compare finetuning, GPM and SGP in about a minute
  sgp run BENCHMARK        learn a task stream: sgp run digits --method sgp
  sgp run FILE.yaml        the same from a config file
  sgp sweep FILE.yaml      run a grid of runs on this machine or on Ray
  sgp list [KIND]          list benchmarks, methods and networks
  sgp show RUN ...         show accuracies and metrics of runs
  sgp report RUN ...       write a page with the paper's tables and figures
  sgp reproduce [TABLE]    compare runs with the paper's tables
  sgp data get NAME        download a data set
  sgp data check [DIR]     check the data sets in a folder

`sgp COMMAND --help` shows the options, `sgp --version` the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: Arguments of the command; by default those of the process, whose Ctrl-C is then handled too.
    """
    if arguments is None:
        exit_on_interrupt()
        arguments = sys.argv[1:]
    # Before anything optional is imported, so that a bare install can print its help and version.
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW)
        return 0
    if list(arguments) == ["--version"]:
        print(f"sgp {sgp.__version__}")
        return 0
    missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
    if missing:
        print(f'sgp needs {" and ".join(missing)}: pip install "sgp-torch[benchmarks]"', file=sys.stderr)
        return 2
    return _run_command(*arguments)


def _run_command(name: str, *arguments: str) -> int:
    from sgp.cli.arguments import Exit
    from sgp.registry import unknown

    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        known = ("--help", "--version") if name.startswith("-") else COMMANDS
        print(f"sgp: {unknown(kind, name, known)}", file=sys.stderr)
        return 2
    try:
        command: Callable[[list[str]], int] = import_module(f"sgp.cli.{COMMANDS[name]}").main
        return command(list(arguments))
    except Exit as end:
        if str(end):
            print(f"sgp {name}: {end}", file=sys.stderr)
        return end.code
    except KeyboardInterrupt:
        print("sgp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        sys.stderr.close()
        return 141
