"""Reports of runs: tables and figures beside those of the paper, made from the folders of the runs alone."""

from importlib.util import find_spec

# Modules of the extra "report", with the names of their packages.
NEEDED = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}


def find_missing_packages() -> str | None:
    """Return what to install before a report can be made, in one line; None if nothing is missing."""
    names = [name for module, name in NEEDED.items() if find_spec(module) is None]
    return f'a report needs {" and ".join(names)}: pip install "sgp-torch[report]"' if names else None
