"""Figures show what the runs contain, in every format, with a title for each value."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")
pytest.importorskip("matplotlib", reason="of the extra 'report'")

from report.run_folders import make_rows, write_digits_run, write_games_run, write_run

from sgp.experiments.config import configure
from sgp.report import palette
from sgp.report.collect import collect_runs
from sgp.report.draw import SVG, draw
from sgp.report.figures import make_figures
from sgp.report.groups import group_runs
from sgp.report.plots import Bar, Bars, Figure, Heat, Lines, Series


def find_figures(place: Path) -> dict[str, Figure]:
    return {figure.name: figure for figure in make_figures(group_runs(collect_runs([place]).runs))}


def lines(figure: Figure) -> Lines:
    assert isinstance(figure.drawing, Lines)
    return figure.drawing


def test_accuracies_are_drawn_when_learned_and_after_all_tasks(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp", 0, start=80)
    write_digits_run(tmp_path, "sgp", 1, start=90)
    write_digits_run(tmp_path, "gpm", start=70)
    found = find_figures(tmp_path)
    learned = {series.label: series for series in lines(found["digits-learned"]).series}
    kept = {series.label: series for series in lines(found["digits-kept"]).series}
    assert list(learned["SGP"].ys) == [85.0] * 10
    assert learned["SGP"].deviations == pytest.approx([50**0.5] * 10)
    assert list(kept["SGP"].ys) == [85.0 - 9 + task for task in range(10)]
    assert learned["GPM"].deviations == []
    assert learned["SGP"].colour == palette.choose_look("sgp")[0] != learned["GPM"].colour


def test_stability_is_drawn_against_plasticity(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp", start=80)
    write_digits_run(tmp_path, "finetune", start=95)
    points = {series.label: series for series in lines(find_figures(tmp_path)["digits-stability"]).series}
    assert (points["Finetuning"].xs, points["Finetuning"].ys) == ([95.0], [-5.0])


def test_time_and_memory_are_relative_to_gpm_with_marks_of_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path / "a", configure("split-cifar100", "gpm", threads=1), make_rows(10), seconds=100, extra=1000)
    write_run(tmp_path / "b", configure("split-cifar100", "sgp", threads=1), make_rows(10), seconds=150, extra=1500)
    found = find_figures(tmp_path)
    for name, published in (("time", 1.16), ("memory", 1.001)):
        drawing = found[f"split-cifar100-{name}"].drawing
        assert isinstance(drawing, Bars)
        assert [(bar.label, bar.value) for bar in drawing.bars] == [("GPM", 1.0), ("SGP", 1.5)]
        assert drawing.bars[1].published == published


def test_a_partial_run_has_no_mark_of_the_paper(tmp_path: Path) -> None:
    for method in ("gpm", "sgp"):
        write_run(tmp_path / method, configure("split-cifar100", method, threads=1, epochs=5), make_rows(10))
    drawing = find_figures(tmp_path)["split-cifar100-time"].drawing
    assert isinstance(drawing, Bars)
    assert all(bar.published is None for bar in drawing.bars)


def test_acc_is_drawn_against_alpha_with_a_line_for_gpm(tmp_path: Path) -> None:
    for alpha, start in ((1.0, 80), (5.0, 82), (25.0, 70)):
        write_digits_run(tmp_path, "sgp", start=start, alpha=alpha, name=f"alpha{alpha}")
    write_digits_run(tmp_path, "gpm", start=60)
    drawing = lines(find_figures(tmp_path)["digits-alpha"])
    (series,) = drawing.series
    assert (list(series.xs), series.ys) == ([1.0, 5.0, 25.0], pytest.approx([75.5, 77.5, 65.5]))
    assert drawing.levels[0][:2] == ("GPM (alpha ∞)", 55.5)


def test_the_alpha_of_another_method_is_not_drawn(tmp_path: Path) -> None:
    for alpha in (0.1, 0.5):
        write_digits_run(tmp_path, "der", alpha=alpha)
    write_digits_run(tmp_path, "gpm")
    assert "digits-alpha" not in find_figures(tmp_path)


def test_a_single_alpha_is_not_drawn(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp")
    assert "digits-alpha" not in find_figures(tmp_path)


def test_a_run_has_a_matrix_free_capacity_importances_and_singular_values(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "sgp", tasks=8)
    found = find_figures(tmp_path)
    heat = found["digits-sgp-1-matrix"].drawing
    assert isinstance(heat, Heat)
    assert [len(row) for row in heat.matrix] == list(range(1, 9))
    (free,) = lines(found["digits-sgp-1-free"]).series
    assert free.ys == pytest.approx([90 - 10 * task for task in range(8)])
    importances = lines(found["digits-sgp-1-importances-1"])
    assert [series.label for series in importances.series] == [f"after task {task}" for task in (1, 2, 4, 5, 7, 8)]
    assert "8 of 11 bases (73 %) are fully blocked" in found["digits-sgp-1-importances-1"].caption
    assert lines(found["digits-sgp-1-singular-1"]).log_y


def test_many_layers_are_averaged_by_kind_and_some_have_curves(tmp_path: Path) -> None:
    layers = ["words", *(f"layer.{number}.{kind}" for number in range(8) for kind in ("query", "dense2"))]
    write_run(tmp_path / "deep", configure("digits", "sgp", threads=1), make_rows(2), layers=layers)
    found = find_figures(tmp_path)
    free = {series.label: series.ys for series in lines(found["digits-sgp-1-free"]).series}
    assert list(free) == ["words", "layer.*.query", "layer.*.dense2"]
    assert free["words"] == pytest.approx([90, 80])
    assert free["layer.*.query"] == pytest.approx([90 - 8, 80 - 8])  # layers 1, 3, ... 15 of those in a row
    assert "of 17 layers the mean of each kind" in found["digits-sgp-1-free"].caption
    curves = [figure.title for name, figure in found.items() if "-importances-" in name]
    assert len(curves) == 12
    assert "words" in curves[0]
    assert "layer.7.dense2" in curves[-1]
    assert "Of 17 layers 12 are drawn." in found["digits-sgp-1-importances-12"].caption


def test_only_what_the_runs_contain_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "old", configure("digits", "sgp", threads=1), make_rows(10), is_current=False)
    assert not any("importances" in name or "singular" in name for name in find_figures(tmp_path))
    write_run(tmp_path / "m" / "joint", configure("digits", "multitask", threads=1), make_rows(10, 90, 0.0))
    assert set(find_figures(tmp_path / "m")) == {"digits-learned", "digits-kept"}


def test_games_have_curves_the_accumulated_reward_and_the_failure_of_adam(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp", 0)
    write_games_run(tmp_path, "sgp", 1)
    write_games_run(tmp_path, "finetune")
    write_games_run(tmp_path, "sgp", 0, level=0.2, optimizer="adam-on-projected")
    found = find_figures(tmp_path)
    assert {"minatar-reward-1", "minatar-reward-2", "minatar-accumulated"} <= set(found)
    first = {series.label: series for series in lines(found["minatar-reward-1"]).series}
    assert len(first) == 2
    (sgp,) = [series for label, series in first.items() if label.startswith("SGP")]
    assert list(sgp.xs) == [0.0, 1.0, 2.0, 3.0, 4.0]
    second = lines(found["minatar-reward-2"]).series[0]
    assert list(second.xs) == [2.0, 3.0, 4.0]  # from when it was first trained
    # Where a game ends and the next begins, what was learned counts, and not the luck of an agent in a game to come.
    accumulated = lines(found["minatar-accumulated"]).series[0]
    assert dict(zip(accumulated.xs, accumulated.ys, strict=True))[2.0] == 1.0
    (adam,) = [figure for name, figure in found.items() if "adam" in name]
    assert [series.label for series in lines(adam).series] == ["SGP: gradient projected, then Adam", "SGP: Adam-GP"]


def test_a_reward_that_is_known_for_some_games_only_has_no_curve(tmp_path: Path) -> None:
    path = write_games_run(tmp_path, "sgp")
    events = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    changed = [event | {"accumulated": None} if event.get("task") == 1 else event for event in events]
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in changed))
    found = find_figures(tmp_path)
    assert "minatar-reward-2" in found
    assert "minatar-accumulated" not in found


def test_the_failure_of_adam_is_shown_beside_a_run_with_otherwise_equal_settings(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp", level=1.0)
    write_games_run(tmp_path, "sgp", level=0.5, alpha=5.0)
    write_games_run(tmp_path, "sgp", level=0.2, alpha=5.0, optimizer="adam-on-projected")
    (adam,) = [figure for name, figure in find_figures(tmp_path).items() if "adam" in name]
    assert [max(series.ys) for series in lines(adam).series] == [6.0, 15.0]
    # Studies of a setting are in no other figure.
    assert [series.label for series in lines(find_figures(tmp_path)["minatar-accumulated"]).series] == ["SGP"]


COLOUR = palette.BLUE
KINDS = [
    Lines([Series("a", [1, 2, 3], [4.0, 5.0, 6.0], COLOUR), Series("b", [1], [2.0], COLOUR, line="")], "x", "y"),
    Lines([Series("a", [1, 10], [0.1, 1.0], COLOUR, deviations=[0.01, 0.1])], "x", "y", log_x=True, log_y=True),
    Bars([Bar("a", 1.0, COLOUR, 0.5, 1.2), Bar("b", 2.0, COLOUR)], "x", 2, 1.0),
    Heat([[1.0], [2.0, 3.0]], ["one", "two"], (0.0, 100.0)),
    Heat([[50.0] * (task + 1) for task in range(13)], [f"task {task + 1}" for task in range(13)], (50.0, 50.0)),
]


@pytest.mark.parametrize("drawing", KINDS, ids=lambda drawing: type(drawing).__name__)
def test_a_figure_is_drawn_in_every_format_with_a_title_for_each_value(drawing: Lines | Bars | Heat) -> None:
    files = draw(Figure("name", "title", drawing))
    assert files["pdf"].startswith(b"%PDF")
    assert files["png"].startswith(b"\x89PNG")
    root = ElementTree.fromstring(files["svg"])
    titles = [element.text for element in root.iter(f"{{{SVG}}}title")]
    values = sum(1 for row in drawing.values() for value in row[1:] if value) if isinstance(drawing, Heat) else None
    expected = values if values is not None else len(drawing.values())
    assert len(titles) == expected
    assert len(set(titles)) == expected
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert all(name is not None and name.startswith("name-") for name in ids)
    # What is referred to is there, under its new name.
    text = files["svg"].decode()
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)) <= set(ids)


def test_tick_labels_are_not_formulas() -> None:
    root = ElementTree.fromstring(draw(Figure("name", "title", KINDS[1]))["svg"])
    ticks = [element.text for element in root.iter(f"{{{SVG}}}text")]
    assert {"1", "10", "0.1"} <= set(ticks)
    assert not any("$" in (text or "") for text in ticks)


def test_drawings_use_the_colours_of_the_page() -> None:
    text = draw(Figure("name", "title", KINDS[0]))["svg"].decode()
    assert f"var(--c{palette.EVERY.index(COLOUR)})" in text
    assert COLOUR.light not in text
    assert "#ffffff" not in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$x^{", "a & b", "名前", "#0b62a8", "]]>", "--><!--"])
def test_names_are_drawn_as_they_are(name: str) -> None:
    files = draw(
        Figure("name", "title", Lines([Series(name, [1], [1.0], COLOUR), Series("b", [1], [2.0], COLOUR)], "x", "y"))
    )
    root = ElementTree.fromstring(files["svg"])
    assert name in [element.text for element in root.iter(f"{{{SVG}}}text")]
    assert not list(root.iter(f"{{{SVG}}}script"))
    assert "<script" not in files["svg"].decode()


def test_lines_of_one_method_have_different_styles() -> None:
    series = [Series(name, [1, 2], [1.0, 2.0], COLOUR) for name in ("alpha 3", "alpha 5")]
    series.append(Series("b", [1, 2], [3.0, 4.0], palette.RED))
    series.append(Series("dotted already", [1, 2], [3.0, 4.0], palette.RED, line=":"))
    root = ElementTree.fromstring(draw(Figure("name", "title", Lines(series, "x", "y")))["svg"])
    groups = {group.get("id"): group for group in root.iter(f"{{{SVG}}}g")}
    dashed = [
        "stroke-dasharray" in ElementTree.tostring(groups[f"name-mark-{number}"], "unicode") for number in range(3)
    ]
    assert dashed == [False, True, False]


def test_drawing_is_deterministic() -> None:
    one, other = (draw(Figure("name", "title", KINDS[0])) for _ in range(2))
    assert one == other


def test_every_method_has_its_own_colour_and_marker() -> None:
    from sgp.methods import METHODS

    looks = [palette.choose_look(name) for name in METHODS]
    assert len(set(looks)) == len(looks)
    assert palette.choose_look("somebody's own") == palette.choose_look("somebody's own")


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", [each for each in palette.EVERY if each not in (palette.GRID, palette.PAGE)])
def test_colours_contrast_with_the_page(colour: palette.Colour) -> None:
    assert contrast(colour.light, palette.PAGE.light) >= 3
    assert contrast(colour.dark, palette.PAGE.dark) >= 3


@pytest.mark.parametrize("colour", [palette.INK, palette.MUTED, palette.BLUE, palette.GREEN, palette.ORANGE])
def test_colours_of_text_have_readable_contrast(colour: palette.Colour) -> None:
    assert contrast(colour.light, palette.PAGE.light) >= 4.5
    assert contrast(colour.dark, palette.PAGE.dark) >= 4.5
