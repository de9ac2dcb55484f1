"""``sgp demo``: finetuning, GPM and SGP on permuted digits in about a minute, and a page of the results.

Importing this package does not import torch.
"""

from typing import TYPE_CHECKING

from sgp.demo.settings import DemoSettings
from sgp.lazy import load_lazily

if TYPE_CHECKING:
    from sgp.demo.comparison import Outcome, run_demo

__all__ = ["DemoSettings", "Outcome", "run_demo"]
__getattr__ = load_lazily(__name__, dict.fromkeys(("Outcome", "run_demo"), "sgp.demo.comparison"))
