"""The README's Python blocks run as they stand, from top to bottom, in one namespace."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def test_the_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, "the README shows no Python"
    # A real module, so that classes defined in a block can be pickled.
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        # Blank lines before it make a traceback point into the README.
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(README), "exec"), module.__dict__)
