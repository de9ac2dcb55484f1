"""Tables have our numbers, the paper's and the deviation; what was not run is blank."""

import csv
import io
import json
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the paper's numbers are YAML files; of the extra 'benchmarks'")

from report.run_folders import make_rows, write_digits_run, write_games_run, write_run

from sgp import paper
from sgp.experiments.config import configure
from sgp.methods import METHODS
from sgp.report import games as of_games
from sgp.report import words
from sgp.report.collect import collect_runs
from sgp.report.formats import escape_latex, format_csv, format_latex
from sgp.report.groups import Group, group_runs
from sgp.report.tables import (
    Cell,
    Column,
    Table,
    make_datasets,
    make_paper_table,
    make_results,
    make_settings,
    make_times,
)
from sgp.report.words import MINUS

BAD = "<script>alert(1)</script>"


def find_groups(place: Path) -> list[Group]:
    return group_runs(collect_runs([place]).runs)


def cell(table: Table, row: str, column: str, *, note: str = "") -> Cell:
    place = [each.title for each in table.columns].index(column)
    (found,) = [each[place] for each in table.rows if each[0].text == row and each[0].note == note]
    return found


@pytest.fixture
def cifar(tmp_path: Path) -> list[Group]:
    for seed, start in enumerate((76.2 + 4.5, 76.4 + 4.5)):
        config = configure("split-cifar100", "sgp", seed=seed, threads=1)
        write_run(tmp_path / f"sgp{seed}", config, make_rows(10, start))
    for method, start, loss in (("gpm", 60.0, 0.0), ("finetune", 50.0, 4.0)):
        config = configure("split-cifar100", method, threads=1)
        write_run(tmp_path / method, config, make_rows(10, start, loss))
    config = configure("split-cifar100", "trgp", "reference", threads=1, epochs=5)
    write_run(tmp_path / "trgp", config, make_rows(10))
    return find_groups(tmp_path)


@pytest.fixture
def table_1(cifar: list[Group]) -> Table:
    table = make_paper_table("split-cifar100", cifar)
    assert table is not None
    return table


def test_ours_stands_beside_the_papers_with_the_deviation(table_1: Table) -> None:
    assert table_1.title == "Table 1 of the paper: Split CIFAR-100"
    assert cell(table_1, "SGP", "ACC (%)").text == "76.30 ± 0.14"
    assert cell(table_1, "SGP", "Runs").text == "2"
    assert cell(table_1, "SGP", "Paper: ACC (%)").text == "76.05 ± 0.43"
    assert cell(table_1, "SGP", "z of ACC").text == "+0.5"
    assert cell(table_1, "SGP", "BWT (%)").text == f"{MINUS}5.00"
    assert cell(table_1, "SGP", "Paper: BWT (%)").text == f"{MINUS}1 ± 0"
    assert cell(table_1, "SGP", "z of BWT").text == f"{MINUS}6.5"
    assert (cell(table_1, "SGP", "Status").text, cell(table_1, "SGP", "Status").tone) == ("off", "off")


def test_a_row_that_agrees_has_a_tone_of_its_own(tmp_path: Path) -> None:
    config = configure("split-cifar100", "gpm", threads=1)
    write_run(tmp_path / "gpm", config, make_rows(10, 72.5, 0.0))
    table = make_paper_table("split-cifar100", find_groups(tmp_path))
    assert table is not None
    assert cell(table, "GPM", "Status") == Cell("agrees", tone="good")


def test_what_was_not_run_is_blank_and_what_was_cut_down_is_in_brackets(table_1: Table) -> None:
    ours = ["Runs", "ACC (%)", "z of ACC", "BWT (%)", "z of BWT"]
    assert all(cell(table_1, "HAT", column) == Cell() for column in ours)
    assert cell(table_1, "HAT", "Status").text == "not run"
    assert cell(table_1, "HAT", "Paper: ACC (%)").text == "72.06 ± 0.50"
    assert cell(table_1, "TRGP", "ACC (%)").text == "(75.50)"
    assert cell(table_1, "TRGP", "z of ACC") == Cell()
    assert cell(table_1, "TRGP", "Status") == Cell("partial", note="5 of 200 epochs")


def test_the_papers_table_has_its_rows_alone_each_once(table_1: Table) -> None:
    published = [words.name_method(each.method) for each in paper.find_cells() if each.benchmark == "split-cifar100"]
    assert [row[0].text for row in table_1.rows] == published
    assert len(table_1.columns) == 9


def test_a_benchmark_that_is_not_in_the_paper_has_no_such_table(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp")
    assert make_paper_table("digits", find_groups(tmp_path)) is None


def test_all_experiments_are_in_a_table_of_few_columns(cifar: list[Group]) -> None:
    table = make_results("split-cifar100", cifar)
    assert len(table.columns) <= 8
    assert cell(table, "Finetuning", "ACC (%)").text == "32.00"
    assert cell(table, "SGP", "Runs").text == "2 seeds"
    assert cell(table, "TRGP", "ACC (%)", note="preset reference; partial: 5 of 200 epochs").text == "75.50"


def test_each_of_our_numbers_links_to_its_runs(cifar: list[Group], table_1: Table) -> None:
    for table in (table_1, make_results("split-cifar100", cifar)):
        for row in table.rows:
            for column, each in zip(table.columns, row, strict=True):
                if each.text and column.numeric and not column.paper and not column.title.startswith("z of"):
                    assert each.link.startswith("group-"), column.title


def test_transfer_and_time_are_relative_to_gpm(cifar: list[Group], tmp_path: Path) -> None:
    results = make_results("split-cifar100", cifar)
    assert cell(results, "SGP", "FWT against GPM").text == "+20.80"
    assert cell(results, "GPM", "FWT against GPM") == Cell()
    write_run(
        tmp_path / "d" / "a",
        configure("split-cifar100", "gpm", threads=1),
        make_rows(10),
        seconds=100,
        extra=1000,
    )
    write_run(
        tmp_path / "d" / "b",
        configure("split-cifar100", "sgp", threads=1),
        make_rows(10),
        seconds=116,
        extra=1001,
    )
    table = make_times(find_groups(tmp_path / "d"))
    assert table is not None
    assert cell(table, "SGP", "Time / GPM").text == "1.16"
    assert cell(table, "SGP", "Paper: time / GPM").text == "1.16"
    assert cell(table, "SGP", "Difference").text == "0.00"
    assert cell(table, "SGP", "Extra memory / GPM").text == "1.001"


def test_without_gpm_there_are_no_relative_times(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp")
    assert make_times(find_groups(tmp_path)) is None


def test_table_2_has_capacity_and_marks_a_spread_that_stands_in(tmp_path: Path) -> None:
    for method in ("stl", "sgp"):
        config = configure("cifar100-superclass", method, "reference", threads=1)
        write_run(tmp_path / method, config, make_rows(20, 68.6))
    table = make_paper_table("cifar100-superclass", find_groups(tmp_path))
    assert table is not None
    assert table.title.startswith("Table 2")
    assert len(table.columns) == 9
    assert cell(table, "STL", "Capacity (%)").text == "2000"
    assert cell(table, "STL", "Paper: capacity (%)").text == "2000"
    assert cell(table, "STL", "z of ACC").text == f"{MINUS}2.7~"
    assert cell(table, "SGP", "z of ACC").text == "+0.1"
    assert "the 0.50 of sgp stands in" in table.note


def test_sizes_of_tasks_are_those_that_a_run_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "a", configure("split-cifar100", "sgp", threads=1), make_rows(10))
    table = make_datasets(find_groups(tmp_path))
    assert table is not None
    assert cell(table, "training examples per task", "Split CIFAR-100").text == "1,200"
    assert cell(table, "training examples per task", "Paper: Split CIFAR-100").text == "4,750"
    assert cell(table, "input size", "Split CIFAR-100").text == "3 × 8 × 8"
    assert cell(table, "tasks", "Split CIFAR-100").text == "10"


def test_runs_of_older_versions_have_no_sizes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", configure("split-cifar100", "sgp", threads=1), make_rows(10), is_current=False)
    table = make_datasets(find_groups(tmp_path))
    assert table is not None
    assert cell(table, "training examples per task", "Split CIFAR-100").text == ""


def test_settings_of_runs_are_shown_beside_the_papers(tmp_path: Path) -> None:
    write_run(tmp_path / "a", configure("split-cifar100", "sgp", threads=1, alpha=25, lr=0.02), make_rows(10))
    row = make_settings(find_groups(tmp_path)).rows[0]
    assert "lr: 0.02" in row[2].text
    assert "alpha: 25" in row[2].text
    assert row[3].text == "lr: 0.05; alpha: 10"


def test_games_have_scores_and_an_accumulated_reward(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp", 0, level=1.0)
    write_games_run(tmp_path, "sgp", 1, level=0.5)
    table = of_games.make_results("minatar", find_groups(tmp_path))
    (row,) = table.rows
    titles = [column.title for column in table.columns]
    assert row[titles.index("Accumulated reward")].text == "1.50 ± 0.71"
    assert row[titles.index("freeway")].text == "22.5 ± 10.6"
    assert row[titles.index("Runs")].text == "2 seeds"


def test_a_game_shows_its_score_when_it_was_learned(tmp_path: Path) -> None:
    metrics = write_games_run(tmp_path, "sgp") / "metrics.jsonl"
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    learned = next(event for event in events if event["event"] == "game")
    learned["scores"] = [44.0]
    metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    (row,) = of_games.make_results("minatar", find_groups(tmp_path)).rows
    # The second and last game has just been learned.
    assert [(cell.text, cell.note) for cell in row[2:4]] == [("30.0", "from 44.0"), ("30.0", "")]


def test_a_game_of_only_some_runs_has_a_column(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp")
    write_games_run(tmp_path, "gpm", names=["space-invaders"])
    table = of_games.make_results("minatar", find_groups(tmp_path))
    games_of = {row[0].text: [cell.text for cell in row[2:5]] for row in table.rows}
    assert [column.title for column in table.columns[2:5]] == ["breakout", "freeway", "space-invaders"]
    assert games_of == {"SGP": ["30.0", "30.0", ""], "GPM": ["", "", "30.0"]}


def test_games_are_not_in_the_table_of_data_sets(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp")
    assert make_datasets(find_groups(tmp_path)) is None
    write_digits_run(tmp_path, "sgp")
    table = make_datasets(find_groups(tmp_path))
    assert table is not None
    assert [column.title for column in table.columns] == ["Statistic", "Digits"]


def table_of(text: str) -> Table:
    columns = [Column("name", numeric=False), Column("value")]
    return Table("t", text, columns, [[Cell(text, note="a note"), Cell("1.0 ± 0.5", 1.0)]])


@pytest.mark.parametrize("text", [BAD, '=HYPERLINK("http://x")', "a,b\nc", '"', "plain"])
def test_a_name_stays_one_cell_of_a_csv_file(text: str) -> None:
    written_down = format_csv(table_of(text))
    header, row = csv.reader(io.StringIO(written_down))
    assert header == ["name", "value", "value as a number"]
    assert row == [f"{text} (a note)", "1.0 ± 0.5", "1.0"]
    assert all(line.startswith('"') for line in written_down.splitlines()[:1])


def test_latex_escapes_names() -> None:
    assert escape_latex(r"50% & \x{y}_$#^~<>") == (
        r"50\% \& \textbackslash{}x\{y\}\_\$\#\textasciicircum{}\textasciitilde{}\textless{}\textgreater{}"
    )
    text = format_latex(table_of(r"\input{/etc/passwd} & more"))
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
