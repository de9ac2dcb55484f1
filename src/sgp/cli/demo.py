"""Command ``sgp demo``."""

from __future__ import annotations

from sgp.cli.arguments import parse_into
from sgp.cli.interrupt import raise_on_interrupt
from sgp.demo import DemoSettings


def main(arguments: list[str]) -> int:
    """Run the demo."""
    settings = parse_into(DemoSettings, "sgp demo [OPTIONS]", arguments)
    from rich.console import Console

    from sgp.demo.comparison import run_demo

    raise_on_interrupt()
    run_demo(Console(), settings)
    return 0
