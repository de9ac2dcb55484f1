"""Continual learning by scaled gradient projection: learn the next task without losing the last one.

Names are imported when they are used, so that `import sgp` does not import torch.
"""

from typing import TYPE_CHECKING

from sgp.lazy import load_lazily

if TYPE_CHECKING:
    from sgp import heads
    from sgp.calibration import calibrate
    from sgp.projection import Block, GradientMemory, LayerType, Numerics, register_layer

__version__ = "0.1.0"

__all__ = ["Block", "GradientMemory", "LayerType", "Numerics", "__version__", "calibrate", "heads", "register_layer"]
__getattr__ = load_lazily(
    __name__,
    {"heads": __name__, "projection": __name__, "calibrate": "sgp.calibration"}
    | dict.fromkeys(("Block", "GradientMemory", "LayerType", "Numerics", "register_layer"), "sgp.projection"),
)
