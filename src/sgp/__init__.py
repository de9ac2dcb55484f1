"""Continual learning by scaled gradient projection: learn the next task without losing the last one."""

from sgp import heads
from sgp.calibration import calibrate
from sgp.projection import Block, GradientMemory, LayerType, Numerics, register_layer

__version__ = "0.1.0"

__all__ = ["Block", "GradientMemory", "LayerType", "Numerics", "__version__", "calibrate", "heads", "register_layer"]
