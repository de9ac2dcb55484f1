"""Command ``sgp demo``."""

from __future__ import annotations

import sys

from sgp.cli.arguments import asks_for_help, parse_into, print_command_help
from sgp.cli.interrupt import raise_on_interrupt
from sgp.demo import DemoSettings


def main(arguments: list[str]) -> int:
    """Run the demo."""
    if asks_for_help(arguments):
        print_command_help(DemoSettings, "sgp demo [OPTIONS]")
        return 0
    try:
        settings = parse_into(DemoSettings, arguments)
    except ValueError as error:
        print(f"sgp demo: {error}", file=sys.stderr)
        return 2
    from rich.console import Console

    from sgp.demo.comparison import run_demo

    raise_on_interrupt()
    run_demo(Console(), settings)
    return 0
