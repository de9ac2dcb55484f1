"""Import packages of the optional extras where they are used, since the core works without them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Names under which packages are installed, where they differ from the module's.
PACKAGES = {"sklearn": "scikit-learn", "PIL": "Pillow", "ale_py": "ale-py", "stable_baselines3": "stable-baselines3"}
# Extras that install the packages, where it is not "benchmarks".
EXTRAS = {
    **{"gymnasium": "rl", "ale_py": "rl", "stable_baselines3": "rl", "minatar": "minatar"},
    **{"transformers": "transformers", "tokenizers": "transformers"},
}


def import_extra(module: str) -> Any:
    """Import a module of an optional package.

    Raises:
        ImportError: The package is not installed; the message has the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        package, extra = PACKAGES.get(top, top), EXTRAS.get(top, "benchmarks")
        raise ImportError(f'this needs {package}: pip install "sgp-torch[{extra}]"', name=top) from error
