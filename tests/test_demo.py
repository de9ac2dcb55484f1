"""A small demo: its table, its sentences, and that SGP forgets less than finetuning."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
pytest.importorskip("yaml", reason="the settings of runs are YAML files; of the extra 'benchmarks'")

from sgp.demo import DemoSettings, Outcome, run_demo
from sgp.experiments.config import as_command
from sgp.experiments.folder import RunFolder
from sgp.report.words import format_number

SMALL = DemoSettings(seeds=1, tasks=2, epochs=3, threshold=0.985)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "here"


@pytest.fixture(scope="module")
def outcomes_and_output(place: Path) -> tuple[dict[str, list[Outcome]], str]:
    console = Console(record=True, width=200)
    outcomes = run_demo(console, replace(SMALL, out=place))
    return outcomes, console.export_text()


@pytest.fixture
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the extra, since drawing takes longer than learning here."""
    monkeypatch.setattr("sgp.report.find_spec", lambda name: None)


def test_the_table_has_a_row_for_each_method(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, output = outcomes_and_output
    assert list(outcomes) == ["finetuning", "GPM", "SGP"]
    for heading in ("ACC", "BWT", "s per run"):
        assert heading in output
    for method, (outcome,) in outcomes.items():
        row = next(line for line in output.splitlines() if line.startswith("│") and method in line)
        assert f"{outcome.acc:.1f}" in row
        assert format_number(outcome.bwt, 1) in row


def test_the_demo_ends_with_a_conclusion_and_a_next_step(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    *_, seen, following, page = outcomes_and_output[1].strip().splitlines()
    assert seen.startswith("Seen at threshold 0.985: ")
    assert following.startswith("Next: ")
    assert page.startswith(("Page: ", "Runs: "))


def test_the_demo_writes_a_page_of_all_runs(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str], place: Path
) -> None:
    pytest.importorskip("matplotlib", reason="of the extra 'report'")
    pytest.importorskip("jinja2", reason="of the extra 'report'")
    *_, last = outcomes_and_output[1].strip().splitlines()
    page = place / "report" / "index.html"
    assert last == f"Page: {page}"
    text = page.read_text(encoding="utf-8")
    for method in ("finetune", "gpm", "sgp"):
        config = RunFolder(place / "runs" / f"digits-{method}-paper-seed0").read_config()
        assert as_command(config) in text


@pytest.mark.usefixtures("without_page")
def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    run_demo(console, DemoSettings(seeds=1, tasks=2, epochs=1, out=tmp_path / "here"))
    *_, last = console.export_text().strip().splitlines()
    assert "a report needs matplotlib and Jinja2" in last
    assert str(tmp_path / "here" / "runs") in last


@pytest.mark.usefixtures("without_page")
def test_an_existing_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here-2").write_text("taken")
    run_demo(Console(quiet=True), DemoSettings(seeds=1, tasks=2, epochs=1, out=tmp_path / "here"))
    assert list((tmp_path / "here").iterdir()) == []
    assert (tmp_path / "here-3" / "runs").is_dir()


def test_sgp_forgets_less_than_finetuning(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, _ = outcomes_and_output
    (finetuning,), (sgp,) = outcomes["finetuning"], outcomes["SGP"]
    assert sgp.bwt > finetuning.bwt + 2
    assert sgp.acc > finetuning.acc


def test_only_methods_with_a_memory_have_a_free_share(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, _ = outcomes_and_output
    (finetuning,), (gpm,), (sgp,) = outcomes.values()
    assert finetuning.free is None
    assert gpm.free is not None
    assert sgp.free is not None
    assert 0 < gpm.free < sgp.free < 1


@pytest.mark.usefixtures("without_page")
def test_infinite_alpha_makes_sgp_gpm_exactly(tmp_path: Path) -> None:
    outcomes = run_demo(
        Console(quiet=True),
        DemoSettings(seeds=1, tasks=2, epochs=1, alpha=math.inf, threshold=0.9, out=tmp_path / "here"),
    )
    (gpm,), (sgp,) = outcomes["GPM"], outcomes["SGP"]
    assert (gpm.acc, gpm.bwt, gpm.free) == (sgp.acc, sgp.bwt, sgp.free)


@pytest.mark.usefixtures("without_page")
def test_the_demo_is_reproducible_and_restores_threads_and_random_state(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str], tmp_path: Path
) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    outcomes = run_demo(Console(quiet=True), replace(SMALL, out=tmp_path / "here"))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for method, (outcome,) in outcomes_and_output[0].items():
        assert (outcomes[method][0].acc, outcomes[method][0].bwt) == (outcome.acc, outcome.bwt)


@pytest.mark.parametrize(
    "bad",
    [
        {"seeds": 0},
        {"tasks": 1},
        {"epochs": 0},
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"threshold": 0.0},
        {"threshold": 1.1},
        {"threshold": math.nan},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(bad: dict[str, float]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        DemoSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_page")
def test_the_demo_compares_at_two_thresholds(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    outcomes = run_demo(console, DemoSettings(seeds=1, tasks=2, epochs=1, out=tmp_path / "here"))
    assert list(outcomes) == ["finetuning", "GPM 0.95", "SGP 0.95", "GPM 0.985", "SGP 0.985"]
    assert outcomes["GPM 0.95"][0].free > outcomes["GPM 0.985"][0].free  # type: ignore[operator]
    assert len(list((tmp_path / "here" / "runs").iterdir())) == 5
    output = console.export_text()
    assert "Seen at threshold 0.95: " in output
    assert "Seen at threshold 0.985: " in output
