"""Check that each package of sgp imports only the packages listed before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgp

ROOT = Path(__file__).parents[1] / "src" / "sgp"

# In order of dependency. "sgp" is the package's own __init__.py: what is listed before it is what `import sgp` loads.
PACKAGES = [
    "lazy",
    "storage",
    "patterns",
    "projection",
    "heads",
    "calibration",
    "sgp",
    "registry",
    "extras",
    "settings",
    "yaml_file",
    "integrations",
    "networks",
    "methods",
    "benchmarks",
    "paper",
    "rl",
    "experiments",
    "report",
    "demo",
    "cli",
    "__main__",
]


def find_package(path: Path) -> str:
    """Return the package that a file belongs to: its folder directly under sgp/, or its own name."""
    first = path.relative_to(ROOT).parts[0]
    return "sgp" if first == "__init__.py" else first.removesuffix(".py")


def find_imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and package of each import from sgp in a source file that lies in a dotted package."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                # `from sgp import x` may be the package x, or a name that sgp itself defines.
                names = [f"{base}.{alias.name}" if base == "sgp" else base for alias in node.names]
            case _:
                continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "sgp":
                name = rest.partition(".")[0]
                yield node.lineno, name if name in PACKAGES else "sgp"


def find_violations(source: str, name: str, package: str) -> list[str]:
    """Return the imports of a file that come later in the order than the package it is in."""
    below = PACKAGES[PACKAGES.index(name) + 1 :]
    return [f"line {line}: {name} imports {other}" for line, other in find_imports(source, package) if other in below]


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_a_package_imports_only_packages_before_it(path: Path) -> None:
    name = find_package(path)
    assert name in PACKAGES, f"add {name} to PACKAGES in its place"
    package = ".".join(["sgp", *path.relative_to(ROOT).parts[:-1]])
    assert find_violations(path.read_text(encoding="utf-8"), name, package) == []


@pytest.mark.parametrize("name", ["projection", "integrations"])
def test_the_first_packages_import_nothing_else(name: str) -> None:
    allowed = set(PACKAGES[: PACKAGES.index(name) + 1])
    for path in (ROOT / name).rglob("*.py"):
        package = ".".join(["sgp", *path.relative_to(ROOT).parts[:-1]])
        used = {other for _, other in find_imports(path.read_text(encoding="utf-8"), package)}
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
def test_every_kind_of_import_is_noticed(line: str) -> None:
    assert find_violations(line, "projection", "sgp.projection")


@pytest.mark.parametrize(
    "line",
    ["import torch", "from sgp.projection.subspace import Subspace", "from . import subspace", "import sgpx"],
)
def test_earlier_and_foreign_packages_are_allowed(line: str) -> None:
    assert find_violations(line, "projection", "sgp.projection") == []


def test_no_package_has_a_name_that_means_nothing() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(ROOT).parts}
    assert names.isdisjoint({"utils", "helpers", "common", "misc"})


def test_the_public_names_exist() -> None:
    assert all(hasattr(sgp, name) for name in sgp.__all__)
