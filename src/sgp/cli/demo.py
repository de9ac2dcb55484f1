"""``sgp demo``"""

from __future__ import annotations

import tyro
from rich.console import Console

from sgp.demo import Demo, run


def main(arguments: list[str]) -> int:
    """Run the demo. A mistake in the arguments ends the process with status 2 and a message."""
    run(Console(), tyro.cli(Demo, prog="sgp demo", args=arguments))
    return 0
