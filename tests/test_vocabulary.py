"""Check that code, docs and tests use the standard words of the glossary in CONTRIBUTING.md."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".html", ".j2")
# The changelog names what was renamed, and runs are data.
EXCLUDED = ("tests/test_vocabulary.py", "CHANGELOG.md", "results/runs/", "tools/migrate_runs.py")

# Expressions that must not be used, with their replacements.
BANNED = {
    r"\broads?\b": "projection mode",
    r"\bguards?\b": "protected layer",
    r"\blots?\b(?! of\b)": "batch, chunk or pass",
    r"\bwatchers?\b": "callback",
    r"\btake_away\b": "subtract_projection",
    r"\bsettled?\b|\bsettling\b": "finalize",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bcome apart\b|\bcame apart\b": "diverge",
    r"\bis there already\b": "already exists",
    r"\b(get|gets|got) it again\b": "download again",
    r"\bgiven twice\b": "duplicate",
    r"\b(go|goes|gone|going|went) on with\b": "resume, continue",
    r"\b(is|are) no numbers?\b|\bno numbers? any more\b": "NaN, infinite",
    r"\btells? of\b": "report, log, notify",
    r"\bin whatever way\b|\ban affair of\b": "a plain sentence",
    r"\btake[ns]? in\b(?! (place|float|bfloat|int|turn|the|a|an|about|full|its|two)\b)": "add, register, update",
    r"\btaken up again\b": "resumed",
    r"\bwhat it knows\b": "evaluate, test",
    r"\bis a riddle\b|\bnobody reads\b": "a plain sentence",
    r"\"\"\"(Of|What|Those|That of|Whose|Whoever) ": "a docstring that begins with a verb",
}


def list_files() -> list[str]:
    """Return the tracked files that contain prose or names."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("the files are listed by git")
    names = [name for name in listed.stdout.splitlines() if name.endswith(SUFFIXES) or name == "Makefile"]
    return [name for name in names if not name.startswith(EXCLUDED) and (ROOT / name).exists()]


def find_banned(text: str) -> list[tuple[int, str, str]]:
    """Return the line, the expression and the replacement of each banned expression in a text."""
    found = []
    for pattern, replacement in BANNED.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            found.append((text.count("\n", 0, match.start()) + 1, match[0], replacement))
    return sorted(found)


def test_files_use_the_standard_vocabulary() -> None:
    files = list_files()
    assert len(files) > 300
    found = [
        f"{name}:{line}: {expression!r}, write: {replacement}"
        for name in files
        for line, expression, replacement in find_banned((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("Three roads lead there.", "roads"),
        ("the loss is no number", "is no number"),
        ('def f():\n    """Of the run."""', '"""Of '),
        ("a run that is gone on with", "gone on with"),
        ("the folder is there already", "is there already"),
    ],
)
def test_banned_expressions_are_found(text: str, expression: str) -> None:
    assert [found for _, found, _ in find_banned(text)] == [expression]


@pytest.mark.parametrize("text", ["batches of a lot of rows", "statistics of BatchNorm", "roadmap", "safeguard"])
def test_standard_expressions_are_accepted(text: str) -> None:
    assert find_banned(text) == []
