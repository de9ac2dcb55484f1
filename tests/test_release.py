"""Lowest versions, the public CI, and one version number everywhere."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sgp

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("lowest", ROOT / "tools" / "lowest.py")
assert spec is not None
assert spec.loader is not None
lowest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lowest)
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_lowest_versions_are_those_of_the_core_and_of_the_extras() -> None:
    project = {
        "name": "own",
        "dependencies": ["torch>=2.8"],
        "optional-dependencies": {"a": ["B>=1.5", "c[d]>=3"], "all": ["own[a]"], "e": ["f>=2"]},
    }
    assert lowest.list_lowest(project, []) == {"torch": "2.8"}
    assert list(lowest.list_lowest(project, ["all"]).items()) == [("B", "1.5"), ("c[d]", "3"), ("torch", "2.8")]


@pytest.mark.parametrize(
    ("dependencies", "message"),
    [(["torch"], "'torch' .* has no lower bound"), (["torch>=2", "torch>=3"], "torch has two lower bounds")],
)
def test_a_dependency_without_one_lower_bound_is_refused(dependencies: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lowest.list_lowest({"name": "own", "dependencies": dependencies}, [])


def test_every_dependency_has_a_lower_bound() -> None:
    found = lowest.list_lowest(PROJECT, ["all"])
    names = {re.split(r"[\[>]", each)[0] for group in PROJECT["optional-dependencies"].values() for each in group}
    assert {name.partition("[")[0] for name in found} >= names - {PROJECT["name"]}


def test_the_public_ci_runs_targets_of_the_makefile_on_every_python_of_the_classifiers() -> None:
    yaml = pytest.importorskip("yaml", reason="of the extra 'benchmarks'")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {"make test", "make check", "make docs", "make test-lowest"} == set(commands)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_every_target_of_the_makefile_is_phony_and_explained() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    assert set(phony.split()) == set(re.findall(r"^([a-z-]+):", text, re.M))
    assert {f"make {target}" for target in phony.split()} - {"make help", "make lint"} <= set(
        re.findall(r'@echo "(make [a-z-]+) ', text)
    )


def test_the_changelog_and_the_citation_have_the_version() -> None:
    released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert released[0] == sgp.__version__
    assert f"\nversion: {sgp.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
