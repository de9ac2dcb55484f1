"""``sgp reproduce``: the tables at 80 columns, and the runs that it makes."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from report.test_reproduction import get_cell, write_cell_run

from sgp.cli import main, reproduce
from sgp.cli.run import parse_request
from sgp.experiments.jobs import Job
from sgp.experiments.record import read_record
from sgp.paper import find_cells, read_cells
from sgp.report.reproduction import find_expected_settings

# A table of one small row, which is run in seconds.
SMALL = """
digits:
  table: table1
  repeated: seed
  settings: {kind: split, tasks: 2, epochs: 1, samples: 40, threads: 1}
  rows:
    finetune: {preset: paper, acc: 50, acc_std: 100, bwt: -0.1, bwt_std: 1}
"""


@pytest.fixture(autouse=True)
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands in for the committed runs."""
    place = tmp_path / "results"
    monkeypatch.setattr(reproduce, "COMMITTED", place)
    return place


@pytest.fixture
def small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the table of SMALL in place of the paper's."""
    (tmp_path / "small.yaml").write_text(SMALL)
    cells = read_cells(tmp_path / "small.yaml")
    for module in ("sgp.paper", "sgp.report.reproduction", "sgp.cli.reproduce"):
        monkeypatch.setattr(f"{module}.find_cells", lambda: cells)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> list[str]:
    capsys.readouterr()
    assert main(["reproduce", *arguments]) == status
    return capsys.readouterr().out.splitlines()


def find_row(lines: list[str], method: str, table: int = 0) -> str:
    """Return the row of a method in one of the tables that were printed."""
    return [line for line in lines if line.split()[:1] == [method]][table]


def test_every_cell_of_the_paper_is_printed_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys)
    for cell in find_cells():
        rows = [line for line in lines if line.split()[:1] == [cell.method]]
        assert any(f"{cell.numbers['acc']:.2f}" in row and row.endswith("not run") for row in rows), cell
        assert "time" not in cell.numbers or any(f"{cell.numbers['time']:.2f}" in row for row in rows), cell
    assert max(map(len, lines)) <= 80


def test_ours_stands_beside_the_papers(capsys: pytest.CaptureFixture[str], committed: Path) -> None:
    cell = get_cell("split-cifar100", "sgp")
    for seed, acc in enumerate((75.0, 77.0)):
        write_cell_run(committed, cell, f"run{seed}", acc=acc, loss=0.2, seed=seed)
    write_cell_run(committed, get_cell("split-cifar100", "gpm"), "gpm", acc=70.0, loss=0.2, seconds=50.0)
    write_cell_run(committed, get_cell("split-cifar100", "hat"), "hat", acc=70.0, tasks=3)
    lines = run(capsys)
    assert max(map(len, lines)) <= 80
    sgp = "sgp        2   76.00 ± 1.41  76.05 ± 0.43  -0.1    -1.0  -1 ± 0   0.0  agrees"
    assert find_row(lines, "sgp") == sgp
    assert find_row(lines, "gpm").endswith("-4.4    -1.0   0 ± 0  -1.4  off")
    assert find_row(lines, "hat").split()[:3] == ["hat", "1", "(70.00)"]
    assert find_row(lines, "hat").endswith("partial")
    assert "  hat: 3 of 10 tasks" in lines
    assert find_row(lines, "sgp", table=-1).split()[:3] == ["sgp", "1.20", "1.16"]
    assert find_row(lines, "hat", table=-1).split()[:3] == ["hat", "partial", "1.62"]


def test_a_spread_that_stands_in_is_marked(capsys: pytest.CaptureFixture[str], committed: Path) -> None:
    write_cell_run(committed, get_cell("cifar100-superclass", "gpm"), "gpm", acc=58.0)
    lines = run(capsys, "--methods", "gpm")
    assert find_row(lines, "gpm", table=2).split() == [
        "gpm",
        "1",
        "58.00",
        "57.72",
        "+0.4~",
        "-10.0",
        *["100"] * 2,
        "agrees",
    ]
    assert any(line.startswith("~: the paper gives no sd for this row; the 0.50 of sgp stands in.") for line in lines)


def test_methods_are_chosen_and_times_still_know_gpm(capsys: pytest.CaptureFixture[str], committed: Path) -> None:
    for method, seconds in (("gpm", 50.0), ("sgp", 75.0)):
        write_cell_run(committed, get_cell("split-cifar100", method), method, seconds=seconds)
    lines = run(capsys, "--methods", "sgp")
    assert not any(line.split()[:1] == ["gpm"] for line in lines)
    assert find_row(lines, "sgp", table=-1).split()[1] == "1.50"


def test_runs_of_another_folder_and_of_out_are_compared_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cell = get_cell("split-cifar100", "sgp")
    write_cell_run(tmp_path / "mine", cell, "run", seed=0)
    write_cell_run(tmp_path / "runs", cell, "run", seed=1)
    assert find_row(run(capsys, "--methods", "sgp"), "sgp").split()[1] == "1"
    assert find_row(run(capsys, "--methods", "sgp", "--runs", "mine"), "sgp").split()[1] == "2"


def test_printing_the_tables_does_not_import_torch(committed: Path) -> None:
    write_cell_run(committed, get_cell("split-cifar100", "sgp"), "run")
    script = (
        "import sys; from pathlib import Path; from sgp.cli import main, reproduce\n"
        f"reproduce.COMMITTED = Path({str(committed)!r})\n"
        "sys.exit(main(['reproduce']) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert find_row(done.stdout.splitlines(), "sgp").split()[1] == "1"


def test_a_run_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], committed: Path) -> None:
    path = write_cell_run(committed, get_cell("split-cifar100", "sgp"), "run")
    (path / "metrics.jsonl").write_text("nothing\n")
    assert main(["reproduce"]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"sgp reproduce: {path} is left out: ")
    assert "damaged in line 1" in error


@pytest.mark.parametrize(
    ("arguments", "clue"),
    [
        (["tabel1"], "there is no table 'tabel1': did you mean table1"),
        (["table1", "--methods", "sgpm"], "no method in the paper's tables 'sgpm': did you mean"),
        (["table1", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["--dry-run"], "dry-run needs a table"),
        (["--runs", "nowhere"], "there is no folder nowhere"),
        (["table1", "--sedes", "1"], "--seeds"),
    ],
)
def test_a_mistake_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], clue: str) -> None:
    assert main(["reproduce", *arguments]) == 2
    assert clue in capsys.readouterr().err


def get_settings_of(command: str) -> dict[str, Any]:
    """Return the settings of the run that a printed command makes."""
    words = shlex.split(command)
    assert words[:2] == ["sgp", "run"]
    request = parse_request(words[2:])
    assert request is not None
    return request.config.flat()


@pytest.mark.parametrize("table", ["table1", "table2", "split-miniimagenet"])
def test_a_dry_run_prints_a_command_for_every_missing_run(
    capsys: pytest.CaptureFixture[str], table: str, tmp_path: Path
) -> None:
    lines = run(capsys, table, "--seeds", "2", "--dry-run")
    commands = [line for line in lines if line.startswith("sgp run ")]
    cells = [cell for cell in find_cells() if table in (cell.table, cell.benchmark)]
    assert len(commands) == 2 * len(cells)
    for cell, command in zip([cell for cell in cells for _ in range(2)], commands, strict=True):
        settings = get_settings_of(command)
        expected = find_expected_settings(cell.benchmark, cell.method)
        assert {name for name in expected if settings[name] != expected[name]} <= {cell.repeated}
    assert len({command.split(" --name ")[1] for command in commands}) == len(commands)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_has_only_what_is_missing_with_an_estimate(
    capsys: pytest.CaptureFixture[str], committed: Path
) -> None:
    write_cell_run(committed, get_cell("split-cifar100", "sgp"), "run", seed=1, seconds=7200.0)
    lines = run(capsys, "split-cifar100", "--methods", "sgp,gpm", "--seeds", "2", "--dry-run")
    assert lines[0] == "3 runs to make, in runs:"
    text = " ".join(" ".join(lines).split())
    assert "split-cifar100 sgp, seed 0: 2 h 00 min each, from 1 of the same settings" in text
    assert "split-cifar100 gpm, seed 0, 1: 1 h 43 min each, 0.86 times sgp's, as in the paper" in text
    assert "about 5 h 26 min of one core in all" in text
    assert [line for line in lines if line.startswith("sgp run ")] == [
        f"sgp run split-cifar100 --method {rest} --resume"
        for rest in (
            "gpm --out runs --name split-cifar100-gpm-paper-seed0",
            "gpm --seed 1 --out runs --name split-cifar100-gpm-paper-seed1",
            "sgp --out runs --name split-cifar100-sgp-paper-seed0",
        )
    ]


@pytest.mark.usefixtures("small_table")
def test_missing_runs_are_made_once_and_then_compared(
    capsys: pytest.CaptureFixture[str], here: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    lines = run(capsys, "table1", "--seeds", "1")
    assert lines[0] == "1 run to make, in runs:"
    assert "  digits finetune, seed 0: time unknown" in lines
    assert len(here) == 1
    assert find_row(lines, "finetune").endswith("agrees")
    run(capsys, "table1", "--seeds", "2")
    assert len(here) == 2
    assert run(capsys, "table1", "--seeds", "2")[0].startswith("Table 1")
    assert len(here) == 2
    assert {read_record(job.folder).settings["seed"] for job in here} == {0, 1}


@pytest.mark.usefixtures("small_table")
def test_a_run_that_was_stopped_is_resumed(
    capsys: pytest.CaptureFixture[str], here: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    run(capsys, "table1", "--seeds", "1")
    (job,) = here
    metrics = job.folder / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    lines = run(capsys, "table1", "--seeds", "1")
    assert [each.folder for each in here] == [job.folder, job.folder]
    assert find_row(lines, "finetune").endswith("agrees")


@pytest.mark.usefixtures("small_table")
@pytest.mark.parametrize(("answer", "runs", "status"), [("y", 1, 0), ("yes", 1, 0), ("", 0, 1), ("n", 0, 1)])
def test_a_terminal_is_asked_first(
    capsys: pytest.CaptureFixture[str],
    here: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    runs: int,
    status: int,
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    run(capsys, "table1", "--seeds", "1", status=status)
    assert len(here) == runs
