"""Option ``--import``: a user's Python file that registers a method, network or benchmark."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def import_files(scripts: Iterable[Path]) -> None:
    """Import Python files as modules that stay loaded, since the types of their settings are looked up later.

    Raises:
        ValueError: There is no such file, or it is not a Python file.
    """
    for script in scripts:
        if not script.is_file():
            raise ValueError(f"--import: there is no file {str(script)!r}")
        spec = spec_from_file_location(f"sgp_import_{script.stem}", script)
        if spec is None or spec.loader is None:
            raise ValueError(f"--import: {str(script)!r} is not a Python file")
        module = sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(module)
