"""Print the lowest version that pyproject.toml allows of each dependency, as requirements of pip.

python tools/lowest.py                  all extras
python tools/lowest.py benchmarks rl    the dependencies of the core and of these extras
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[\w,-]*\])?(?:>=(?P<version>[\w.]+))?")


def list_lowest(project: dict[str, Any], extras: Sequence[str]) -> dict[str, str]:
    """Return the lowest version of each dependency by its name, with the dependency's extras, in alphabetical order.

    Args:
        project: Table ``project`` of a pyproject.toml.
        extras: Extras whose dependencies are wanted beside those of the core.

    Raises:
        ValueError: A dependency is not written as ``name>=version``, or has two lower bounds.
    """
    found: dict[str, str] = {}
    for name, version in _iterate(project, [*project["dependencies"], f"{project['name']}[{','.join(extras)}]"]):
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds in pyproject.toml, {found[name]} and {version}: use one")
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _iterate(project: dict[str, Any], requirements: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names and lowest versions, of the project's own extras those of their dependencies."""
    for requirement in requirements:
        match = REQUIREMENT.fullmatch(requirement)
        if match and match["name"] == project["name"]:
            for extra in filter(None, (match["extras"] or "[]")[1:-1].split(",")):
                yield from _iterate(project, project["optional-dependencies"][extra])
        elif match and match["version"]:
            yield match["name"] + (match["extras"] or ""), match["version"]
        else:
            raise ValueError(f"{requirement!r} in pyproject.toml has no lower bound: write it as name>=version")


def main(extras: Sequence[str]) -> None:
    """Print the requirements."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    for name, version in list_lowest(project, extras or ["all"]).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main(sys.argv[1:])
