"""Ours, the paper's, and the difference; and what is left blank."""

import csv
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the paper's numbers are YAML files; of the extra 'benchmarks'")

from report.written import digits, falling, games, written

from sgp import paper
from sgp.experiments.config import configure
from sgp.methods import METHODS
from sgp.report import games as of_games
from sgp.report.collect import collect
from sgp.report.formats import as_csv, as_latex, escape
from sgp.report.groups import Group, group
from sgp.report.tables import Cell, Column, Table, datasets, results, settings, times
from sgp.report.words import MINUS

BAD = "<script>alert(1)</script>"


def groups_of(place: Path) -> list[Group]:
    return group(collect([place]).runs)


def cell(table: Table, row: str, column: str, *, note: str = "") -> Cell:
    place = [each.title for each in table.columns].index(column)
    (found,) = [each[place] for each in table.rows if each[0].text == row and each[0].note == note]
    return found


@pytest.fixture
def cifar(tmp_path: Path) -> Table:
    for seed, start in enumerate((76.2 + 4.5, 76.4 + 4.5)):
        written(tmp_path / f"sgp{seed}", configure("split-cifar100", "sgp", seed=seed, threads=1), falling(10, start))
    written(tmp_path / "gpm", configure("split-cifar100", "gpm", threads=1), falling(10, 60.0, 0.0))
    written(tmp_path / "trgp", configure("split-cifar100", "trgp", threads=1, epochs=5), falling(10))
    written(tmp_path / "finetune", configure("split-cifar100", "finetune", threads=1), falling(10, 50.0, 4.0))
    return results("split-cifar100", groups_of(tmp_path))


def test_ours_stands_beside_the_papers_with_the_difference(cifar: Table) -> None:
    assert cifar.title == "Table 1 of the paper: Split CIFAR-100"
    assert cell(cifar, "SGP", "ACC (%)").text == "76.30 ± 0.14"
    assert cell(cifar, "SGP", "Runs").text == "2 seeds"
    assert cell(cifar, "SGP", "Paper: ACC (%)").text == "76.05 ± 0.43"
    difference = cell(cifar, "SGP", "Difference")
    assert (difference.text, difference.note, difference.tone) == ("+0.25", "inside", "good")
    assert cell(cifar, "SGP", "BWT (%)").text == f"{MINUS}5.00 ± 0.00"
    assert cell(cifar, "SGP", "Paper: BWT (%)").text == f"{MINUS}1.0 ± 0.0"
    assert cell(cifar, "SGP", "BWT difference").note == "outside"
    assert cell(cifar, "GPM", "Difference").note == "outside"
    assert cell(cifar, "GPM", "BWT difference").note == "inside"


def test_what_was_not_run_or_not_in_full_is_blank_and_never_the_papers(cifar: Table) -> None:
    ours = ["ACC (%)", "BWT (%)", "Runs", "Time", "Extra memory", "Difference"]
    for method in ("HAT", "TRGP"):
        assert all(cell(cifar, method, column) == Cell() for column in ours), method
    assert cell(cifar, "HAT", "Paper: ACC (%)").text == "72.06 ± 0.50"
    partial = "partial: 5 of 200 epochs"
    assert cell(cifar, "TRGP", "ACC (%)", note=partial).text == "75.50"
    assert cell(cifar, "TRGP", "Paper: ACC (%)", note=partial) == Cell()


def test_every_row_of_the_papers_table_is_there_once_and_ours_too(cifar: Table) -> None:
    published = [method for of, method in paper.rows() if of == "split-cifar100" and paper.numbers(of, method)]
    theirs = [row for row in cifar.rows if row[-4].text]
    assert len(theirs) == len(published)
    assert {row[0].text for row in cifar.rows} >= {"Finetuning", "Multitask", "FS-DGPM"}


def test_each_of_our_numbers_leads_to_its_runs(cifar: Table) -> None:
    for row in cifar.rows:
        for column, each in zip(cifar.columns, row, strict=True):
            if each.text and not column.paper and "ifference" not in column.title and row[1].text:
                assert each.link.startswith("group-"), column.title


def test_transfer_and_time_are_against_gpm(cifar: Table, tmp_path: Path) -> None:
    assert cell(cifar, "SGP", "FWT against GPM").text == "+20.80"
    assert cell(cifar, "GPM", "FWT against GPM") == Cell()
    written(tmp_path / "d" / "a", configure("split-cifar100", "gpm", threads=1), falling(10), seconds=100, extra=1000)
    written(tmp_path / "d" / "b", configure("split-cifar100", "sgp", threads=1), falling(10), seconds=116, extra=1001)
    table = times(groups_of(tmp_path / "d"))
    assert table is not None
    assert cell(table, "SGP", "Time / GPM").text == "1.16"
    assert cell(table, "SGP", "Paper: time / GPM").text == "1.16"
    assert cell(table, "SGP", "Difference").text == "0.00"
    assert cell(table, "SGP", "Extra memory / GPM").text == "1.001"


def test_without_gpm_there_are_no_relative_times(tmp_path: Path) -> None:
    digits(tmp_path, "sgp")
    assert times(groups_of(tmp_path)) is None


def test_table_2_has_capacity(tmp_path: Path) -> None:
    for method in ("stl", "sgp"):
        written(tmp_path / method, configure("cifar100-superclass", method, "reference", threads=1), falling(20, 68.6))
    table = results("cifar100-superclass", groups_of(tmp_path))
    assert table.title.startswith("Table 2")
    assert cell(table, "STL", "Capacity (%)", note="preset reference").text == "2000"
    assert cell(table, "STL", "Paper: capacity (%)", note="preset reference").text == "2000"
    assert cell(table, "STL", "Difference", note="preset reference").note == "no spread given"
    assert cell(table, "SGP", "Difference", note="preset reference").note == "inside"


def test_sizes_of_tasks_are_what_a_run_has_written_down(tmp_path: Path) -> None:
    written(tmp_path / "a", configure("split-cifar100", "sgp", threads=1), falling(10))
    table = datasets(groups_of(tmp_path))
    assert table is not None
    assert cell(table, "training examples per task", "Split CIFAR-100").text == "1,200"
    assert cell(table, "training examples per task", "Paper: Split CIFAR-100").text == "4,750"
    assert cell(table, "input size", "Split CIFAR-100").text == "3 × 8 × 8"
    assert cell(table, "tasks", "Split CIFAR-100").text == "10"


def test_runs_of_older_versions_have_no_sizes(tmp_path: Path) -> None:
    written(tmp_path / "a", configure("split-cifar100", "sgp", threads=1), falling(10), told=False)
    table = datasets(groups_of(tmp_path))
    assert table is not None
    assert cell(table, "training examples per task", "Split CIFAR-100").text == ""


def test_settings_are_the_runs_own_beside_the_papers(tmp_path: Path) -> None:
    written(tmp_path / "a", configure("split-cifar100", "sgp", threads=1, alpha=25, lr=0.02), falling(10))
    row = settings(groups_of(tmp_path)).rows[0]
    assert "lr: 0.02" in row[2].text
    assert "alpha: 25" in row[2].text
    assert row[3].text == "lr: 0.05; alpha: 10"


def test_games_have_scores_and_an_accumulated_reward(tmp_path: Path) -> None:
    games(tmp_path, "sgp", 0, level=1.0)
    games(tmp_path, "sgp", 1, level=0.5)
    table = of_games.results("minatar", groups_of(tmp_path))
    (row,) = table.rows
    titles = [column.title for column in table.columns]
    assert row[titles.index("Accumulated reward")].text == "1.50 ± 0.71"
    assert row[titles.index("freeway")].text == "22.5 ± 10.6"
    assert row[titles.index("Runs")].text == "2 seeds"


def test_a_game_says_what_it_had_when_it_was_learned(tmp_path: Path) -> None:
    metrics = games(tmp_path, "sgp") / "metrics.jsonl"
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    learned = next(event for event in events if event["event"] == "game")
    learned["scores"] = [44.0]
    metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    (row,) = of_games.results("minatar", groups_of(tmp_path)).rows
    # The second and last game has just been learned.
    assert [(cell.text, cell.note) for cell in row[2:4]] == [("30.0", "from 44.0"), ("30.0", "")]


def test_a_game_that_only_some_runs_have_learned_has_a_column_too(tmp_path: Path) -> None:
    games(tmp_path, "sgp")
    games(tmp_path, "gpm", names=["space-invaders"])
    table = of_games.results("minatar", groups_of(tmp_path))
    games_of = {row[0].text: [cell.text for cell in row[2:5]] for row in table.rows}
    assert [column.title for column in table.columns[2:5]] == ["breakout", "freeway", "space-invaders"]
    assert games_of == {"SGP": ["30.0", "30.0", ""], "GPM": ["", "", "30.0"]}


def test_games_have_no_data_sets(tmp_path: Path) -> None:
    games(tmp_path, "sgp")
    assert datasets(groups_of(tmp_path)) is None
    digits(tmp_path, "sgp")
    table = datasets(groups_of(tmp_path))
    assert table is not None
    assert [column.title for column in table.columns] == ["Statistic", "Digits"]


def table_of(text: str) -> Table:
    columns = [Column("name", numeric=False), Column("value")]
    return Table("t", text, columns, [[Cell(text, note="a note"), Cell("1.0 ± 0.5", 1.0)]])


@pytest.mark.parametrize("text", [BAD, '=HYPERLINK("http://x")', "a,b\nc", '"', "plain"])
def test_a_name_stays_one_cell_of_a_csv_file(text: str) -> None:
    written_down = as_csv(table_of(text))
    header, row = csv.reader(io.StringIO(written_down))
    assert header == ["name", "value", "value as a number"]
    assert row == [f"{text} (a note)", "1.0 ± 0.5", "1.0"]
    assert all(line.startswith('"') for line in written_down.splitlines()[:1])


def test_latex_prints_names_as_they_are() -> None:
    assert escape(r"50% & \x{y}_$#^~<>") == (
        r"50\% \& \textbackslash{}x\{y\}\_\$\#\textasciicircum{}\textasciitilde{}\textless{}\textgreater{}"
    )
    text = as_latex(table_of(r"\input{/etc/passwd} & more"))
    assert r"\input" not in text
    (row,) = [line for line in text.splitlines() if "passwd" in line and "caption" not in line]
    assert row.endswith(r"& 1.0 $\pm$ 0.5 \\")
    assert row.count(" & ") == 1


def test_numbers_of_the_papers_other_tables_are_of_known_benchmarks_and_methods() -> None:
    for benchmark in ("split-cifar100", "split-miniimagenet", "cifar100-superclass"):
        own = paper.times(benchmark)
        assert own["gpm"] == 1
        assert set(own) <= set(METHODS)
        assert paper.table("datasets", benchmark)["tasks"] in (10, 20)
        assert paper.table("quoted", benchmark)["fwt"] in (2, 4, 5)
    assert paper.times("split-cifar100")["fs-dgpm"] == 10.25
    assert paper.times("digits") == {}
