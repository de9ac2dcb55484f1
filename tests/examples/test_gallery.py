"""Each script of the gallery runs as a user runs it, and prints less forgetting with the memory than without it."""

import io
import json
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
# Libraries that a script needs beside torch.
LIBRARIES = {
    "own_loop": ["sklearn"],
    "transformers_trainer": ["transformers", "accelerate"],
    "lightning_trainer": ["lightning", "sklearn"],
    "stable_baselines3_games": ["stable_baselines3"],
    "peft_lora": ["peft", "sklearn"],
    "sgp_in_one_file": ["sklearn"],
}
RESULT = re.compile(r"^(.+?)  +(?:ACC |reward )? *([\d.]+) +(?:BWT )? *(-?[\d.]+)$", re.MULTILINE)


def run_script(name: str) -> list[tuple[float, float]]:
    """Return the pairs of ACC and BWT that a script prints, in order."""
    for library in LIBRARIES[name]:
        pytest.importorskip(library, reason=f"examples/{name}.py needs {library}")
    threads, printed = torch.get_num_threads(), io.StringIO()
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return [(float(acc), float(bwt)) for _, acc, bwt in RESULT.findall(printed.getvalue())]


def test_every_script_is_tested_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == set(LIBRARIES)
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.[pi]*"))


def check_less_forgetting(name: str) -> None:
    without, *with_memory = run_script(name)
    assert with_memory
    for acc, bwt in with_memory:
        assert acc > without[0]
        assert bwt > without[1] + 2


def test_a_script_shows_less_forgetting_in_an_own_loop() -> None:
    check_less_forgetting("own_loop")


# Of Lightning itself.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "own_loop"])
def test_a_script_shows_less_forgetting(name: str) -> None:
    check_less_forgetting(name)


def test_the_notebook_is_valid_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((EXAMPLES / "quick_start.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"].keys() == {"display_name", "language", "name"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook")
    for cell in notebook["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
            assert cell["execution_count"] is None
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"quick_start.ipynb, {cell['id']}", "exec"), module.__dict__)
        assert cell.keys() == keys
    assert module.kept > module.forgotten + 0.05
    assert module.second > 0.8
    assert module.restored.tasks == 2
