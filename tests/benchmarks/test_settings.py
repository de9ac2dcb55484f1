"""Invalid settings raise errors with their name, the value and what is accepted."""

import ast
import inspect
import math
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.benchmark import Benchmark

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


BAD = [
    *[(name, {"tasks": bad}) for name in OURS for bad in (0, -1, 2.5, True)],
    *[(name, {"validation": bad}) for name in OURS for bad in (-0.1, 1.0, math.nan)],
    *[(name, {"validation_seed": bad}) for name in OURS if name != "permuted-mnist" for bad in (-1, 2**32, 0.5)],
    ("split-cifar100", {"tasks": 11}),
    ("cifar100-superclass", {"tasks": 21}),
    ("cifar100-superclass", {"order": 5}),
    ("cifar100-superclass", {"order": -1}),
    ("cifar100-superclass", {"pixels": "false"}),
    ("split-miniimagenet", {"tasks": 21}),
    ("split-miniimagenet", {"class_seed": -1}),
    ("permuted-mnist", {"tasks": 101}),
    ("five-datasets", {"tasks": 6}),
    ("five-datasets", {"fashion": "mnist"}),
    ("digits", {"kind": "rotated"}),
]


@pytest.mark.parametrize(("name", "bad"), BAD, ids=str)
def test_an_invalid_setting_is_named_in_the_error(name: str, bad: dict[str, Any]) -> None:
    benchmark: Benchmark = BENCHMARKS[name]
    ((field, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{field} must be") as refused:
        benchmark.settings(**bad)
    assert repr(value) in str(refused.value)
