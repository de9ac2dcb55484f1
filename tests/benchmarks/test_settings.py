"""Invalid settings raise errors with their name, the value and what is accepted."""

import ast
import inspect
import math
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest

from sgp.benchmarks import BENCHMARKS
from sgp.settings import find_options

OURS = ("digits", "split-cifar100", "cifar100-superclass", "split-miniimagenet", "permuted-mnist", "five-datasets")


def test_the_benchmarks_are_registered_under_their_names() -> None:
    assert set(OURS) <= set(BENCHMARKS)
    for name in OURS:
        assert BENCHMARKS[name].name == name
        assert BENCHMARKS[name].description.endswith(".")


def test_the_registry_needs_nothing_but_the_core() -> None:
    optional = ["sklearn", "PIL", "scipy", "pooch"]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({optional!r}));"
        "from sgp.benchmarks import BENCHMARKS; assert list(BENCHMARKS)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_extra_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits = BENCHMARKS["digits"]
    with pytest.raises(ImportError, match=r'^this needs scikit-learn: pip install "sgp-torch\[benchmarks\]"$'):
        digits.stream(digits.settings(), None, 0)


@pytest.mark.parametrize("name", OURS)
def test_defaults_are_accepted_and_every_setting_has_a_help_text(name: str) -> None:
    settings = BENCHMARKS[name].settings
    settings()
    # The command shows the string below a field as its help.
    (class_,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(class_, ast.ClassDef)
    lines = ast.unparse(class_).splitlines()
    for field in fields(settings):
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{field.name}:"))
        assert lines[at + 1].strip().startswith(("'", '"')), field.name


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_setting_declares_what_it_accepts(name: str) -> None:
    settings = BENCHMARKS[name].settings
    hints = get_type_hints(settings)
    for entry in fields(settings):
        if not {bool, str} & set(find_options(hints[entry.name])):
            with pytest.raises(ValueError, match=f"{entry.name} must be"):
                settings(**{entry.name: math.nan})


LARGEST = [
    ("split-cifar100", {"tasks": 10}),
    ("cifar100-superclass", {"tasks": 20}),
    ("cifar100-superclass", {"order": 4}),
    ("split-miniimagenet", {"tasks": 20}),
    ("permuted-mnist", {"tasks": 100}),
    ("five-datasets", {"tasks": 5}),
    ("clinc150", {"tasks": 10}),
    ("clinc150", {"sentences": 100}),
    ("fivetext", {"tasks": 5}),
]


@pytest.mark.parametrize(("name", "largest"), LARGEST, ids=str)
def test_more_than_there_is_raises_an_error(name: str, largest: dict[str, int]) -> None:
    settings = BENCHMARKS[name].settings
    settings(**largest)
    ((field, value),) = largest.items()
    with pytest.raises(ValueError, match=f"{field} must be from"):
        settings(**{field: value + 1})
