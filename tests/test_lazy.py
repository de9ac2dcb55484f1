"""Packages import torch only when something that needs it is used."""

import subprocess
import sys

import pytest

from sgp.lazy import Deferred, load_lazily
from sgp.methods import METHODS, MethodFacts

WITHOUT_TORCH = [
    "sgp",
    "sgp.methods",
    "sgp.networks",
    "sgp.benchmarks",
    "sgp.paper",
    "sgp.rl",
    "sgp.experiments.config",
]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importing_does_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_names_of_the_package_are_imported_when_used() -> None:
    script = (
        "import sys, sgp; sgp.GradientMemory, sgp.heads.realign, sgp.projection.Block; from sgp import *;"
        "assert 'torch' in sys.modules and GradientMemory is sgp.GradientMemory"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    find = load_lazily("sgp", {"GradientMemory": "sgp.projection"})
    with pytest.raises(AttributeError, match="module 'sgp' has no attribute 'Memory'"):
        find("Memory")


def test_a_deferred_function_passes_its_arguments_on() -> None:
    assert Deferred("math:hypot")(3, 4) == 5


FACTS = [name for name in vars(MethodFacts) if not name.startswith("_")]


@pytest.mark.parametrize("name", list(METHODS))
def test_the_facts_of_a_method_are_those_of_its_class(name: str) -> None:
    facts, method = METHODS.facts(name), METHODS[name]
    assert facts.name == name
    assert facts is not method
    for fact in ("name", "description", *FACTS):
        assert getattr(method, fact) == getattr(facts, fact), fact
