"""The reliability campaign in short, and its figures in the docs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3", reason="of the extra 'rl'")
pytest.importorskip("yaml", reason="of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="of the extra 'benchmarks'")

from bench.soak import damage, page
from bench.soak.__main__ import PARTS
from bench.soak.calls import call
from bench.soak.mutate import mutate_bytes, mutate_value
from bench.soak.tasks import Usage, find_growth

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PARTS)
def test_a_quick_campaign_finds_no_fault(name: str, tmp_path: Path) -> None:
    if name == "sweep":
        pytest.importorskip("ray", reason="of the extra 'ray'")
    # A process of its own: the objects and the memory of other tests must not count.
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "bench.soak", "--quick", "--seed", "1", "--only", name]
    subprocess.run([*command, "--out", tmp_path / "soak.json"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["parts"][name]["faults"] == []


@pytest.mark.parametrize("measure", ["resident", "handles", "objects"])
def test_growth_is_a_fault(measure: str) -> None:
    usage = {"resident": 100.0, "handles": 5, "objects": 1000}
    grown = usage | {measure: usage[measure] + 300}
    assert list(find_growth(Usage(**usage), Usage(**usage), 50)) == []
    assert [fault.split()[0] for fault in find_growth(Usage(**usage), Usage(**grown), 50)] == [measure]


def test_an_exception_and_an_unclear_error_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(["--version"]).fault == ""
    assert call(["nonsense"]).message.startswith("sgp: ")
    monkeypatch.setattr("bench.soak.calls.main", lambda arguments: 1)
    assert "exit code 1" in call(["run"]).fault
    monkeypatch.setattr("bench.soak.calls.main", lambda arguments: {}["key"])
    assert "KeyError" in call(["run"]).fault


def test_a_config_that_is_refused_in_one_line_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("benchmark: digits\nmethod: sgp\nlr: high\n", encoding="utf-8")
    outcome = damage._parse(path, "value")
    assert (outcome.is_accepted, outcome.fault) == (False, "")


def test_damage_depends_on_the_seed_alone_and_changes_something() -> None:
    values = {"a": [1, 2, {"b": "c"}], "d": None}
    one, two = ([mutate_value(values, random.Random(seed)) for seed in range(50)] for _ in range(2))
    assert repr(one) == repr(two)
    assert sum(repr(each) != repr(values) for each in one) > 40
    data = bytes(range(200))
    assert sum(mutate_bytes(data, random.Random(seed)) != data for seed in range(50)) > 40


def test_the_figures_in_the_docs_are_those_of_the_committed_campaign() -> None:
    report = json.loads(page.FIGURES.read_text(encoding="utf-8"))
    assert not report["quick"]
    assert report["parts"].keys() == PARTS.keys()
    assert [part["faults"] for part in report["parts"].values()] == [[]] * len(PARTS)
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.make_page(text, report), "run python -m bench.soak.page"
    assert "100 tasks in a row" in text
