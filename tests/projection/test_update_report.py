"""The report of an update, and its progress in a terminal."""

import io

import pytest
import torch
from torch import nn

import sgp
from sgp.projection import update_report
from sgp.projection.update_report import UpdateProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal that replaces stderr; in a fixture pytest would replace it again."""
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_a_report_has_a_line_for_each_gram_matrix() -> None:
    torch.manual_seed(0)
    memory = sgp.GradientMemory(nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 2)), threshold=0.9)
    batch = torch.randint(9, (20,))
    report = memory.update([batch])
    words, linear = report.layers
    assert (words.layers, words.path, words.passes, words.rows) == (["0"], "float64", 1, 20)
    assert (linear.layers, linear.dimension, linear.added) == (["1"], 7, linear.bases)
    for layer in report.layers:
        assert layer.captured is not None
        assert 0.9 <= layer.captured <= 1 + 1e-12
        assert not layer.is_bound
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert lines[3].split()[:3] == [str(linear.bases), "7", str(linear.bases)]
    again = memory.update([batch])
    assert [layer.added for layer in again.layers] == [0, 0]


def test_a_layer_of_which_only_zeros_are_seen_captures_nothing() -> None:
    memory = sgp.GradientMemory(nn.Linear(4, 2, bias=False), threshold=0.9)
    (layer,) = memory.update([torch.zeros(20, 4)]).layers
    assert (layer.bases, layer.captured) == (0, 0.0)


def test_a_quick_update_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    memory = sgp.GradientMemory(nn.Linear(4, 2), threshold=0.3)
    memory.update([torch.randn(20, 4)])
    assert not terminal.getvalue()


def test_a_long_update_shows_its_progress_in_a_terminal_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(update_report, "PROGRESS_DELAY", 0.0)
    with UpdateProgress(1, [1, 2], is_shown=True) as progress:
        progress.advance()
        progress.add_pass()
        progress.advance()
    shown = terminal.getvalue().split("\r")
    assert [line.split()[-1] for line in shown if line.strip()] == ["50%", "50%"]
    assert not shown[-2].strip()


def test_progress_without_a_length_counts_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(update_report, "PROGRESS_DELAY", 0.0)
    memory = sgp.GradientMemory(nn.Linear(4, 2), threshold=0.3)
    memory.update(torch.randn(20, 4) for _ in range(3))
    assert "memory.update: 3 batches" in terminal.getvalue()


def test_other_processes_and_files_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with UpdateProgress(1, [1], is_shown=False) as progress:
        progress.advance()
    assert not capsys.readouterr().err
