"""The command ``sgp``."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

import sgp

# Modules of the extra "benchmarks" that the command needs, by the names they are installed under.
NEEDED = {"tyro": "tyro", "sklearn": "scikit-learn"}


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

    from rich.console import Console
    from tyro.extras import subcommand_cli_from_dict

    from sgp.demo import Demo, run

    # Without arguments, say what there is rather than that something is missing. A mistake in them ends the process
    # in here, with status 2 and a message.
    demo: Demo = subcommand_cli_from_dict(
        {"demo": Demo},
        prog="sgp",
        description="Continual learning by scaled gradient projection. `sgp --version` tells the version.",
        args=arguments or ["--help"],
    )
    try:
        run(Console(), demo)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
