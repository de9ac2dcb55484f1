"""The Python blocks of a page run as they stand, from top to bottom, in one namespace."""

import re
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/quick-start.md", "docs/your-own-model.md", "docs/your-own-loop.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives to a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} shows no Python"
    if "from transformers import" in text:
        pytest.importorskip("transformers")
    # A real module, so that classes defined in a block can be pickled.
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        # Blank lines before it make a traceback point into the page.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(path), "exec"), module.__dict__)
