"""A room of the package uses the rooms above it, never those below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgp

PACKAGE = Path(__file__).parents[1] / "src" / "sgp"

# From top to bottom. "sgp" is the package's own __init__.py: what stands above it is what `import sgp` gives.
ROOMS = [
    "projection",
    "sgp",
    "registry",
    "integrations",
    "networks",
    "methods",
    "benchmarks",
    "paper",
    "runs",
    "training",
    "rl",
    "report",
    "demo",
    "cli",
    "__main__",
]


def room_of(path: Path) -> str:
    """The room a file of the package belongs to: its folder directly under sgp/, or its own name."""
    first = path.relative_to(PACKAGE).parts[0]
    return "sgp" if first == "__init__.py" else first.removesuffix(".py")


def imported_rooms(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and room of each import of ours, wherever in the file it is. package: the dotted one that the file is in."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                # `from sgp import x` may be the room x, or a name of the package itself.
                names = [f"{base}.{alias.name}" if base == "sgp" else base for alias in node.names]
            case _:
                continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "sgp":
                room = rest.partition(".")[0]
                yield node.lineno, room if room in ROOMS else "sgp"


def violations(source: str, room: str, package: str) -> list[str]:
    """What a file of a room imports that stands below it."""
    below = ROOMS[ROOMS.index(room) + 1 :]
    return [f"line {line}: {room} uses {other}" for line, other in imported_rooms(source, package) if other in below]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_a_room_uses_only_rooms_above_it(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"{room} is no room yet: give it its place in the list"
    package = ".".join(["sgp", *path.relative_to(PACKAGE).parts[:-1]])
    assert violations(path.read_text(encoding="utf-8"), room, package) == []


@pytest.mark.parametrize("room", ["projection", "integrations"])
def test_the_top_rooms_need_nothing_else_of_ours(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in (PACKAGE / room).rglob("*.py"):
        package = ".".join(["sgp", *path.relative_to(PACKAGE).parts[:-1]])
        used = {other for _, other in imported_rooms(path.read_text(encoding="utf-8"), package)}
        assert used <= allowed, path


@pytest.mark.parametrize(
    "line",
    [
        "import sgp",
        "import sgp.networks.mlp",
        "from sgp import GradientMemory",
        "from sgp import networks",
        "from sgp.cli import main",
        "from ..networks import mlp",
        "from .. import networks",
        "def late():\n    from sgp.demo import run",
    ],
)
def test_every_way_to_reach_down_is_noticed(line: str) -> None:
    assert violations(line, "projection", "sgp.projection")


@pytest.mark.parametrize(
    "line",
    ["import torch", "from sgp.projection.subspace import Subspace", "from . import subspace", "import sgpx"],
)
def test_what_stands_above_or_outside_is_allowed(line: str) -> None:
    assert violations(line, "projection", "sgp.projection") == []


def test_no_room_is_a_junk_room() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(PACKAGE).parts}
    assert names.isdisjoint({"utils", "helpers", "common", "misc"})


def test_the_public_names_exist() -> None:
    assert all(hasattr(sgp, name) for name in sgp.__all__)
