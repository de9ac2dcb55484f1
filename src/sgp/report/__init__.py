"""Tables, figures and a page of what runs have come to, beside the paper's; from their folders and nothing else."""

from importlib.util import find_spec

# Modules of the extra "report", by the names they are installed under.
NEEDED = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}


def missing() -> str | None:
    """What to install before a report can be made, in one line; None if all is there."""
    names = [name for module, name in NEEDED.items() if find_spec(module) is None]
    return f'a report needs {" and ".join(names)}: pip install "sgp-torch[report]"' if names else None
