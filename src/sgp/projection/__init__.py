"""Scaled gradient projection for any PyTorch model and any optimizer; depends on torch alone."""

from sgp.projection import recurrent  # noqa: F401 - registers the layer types
from sgp.projection.capacity import Capacity, LayerCapacity, Summary
from sgp.projection.check import Check, LayerCheck
from sgp.projection.hook import OptimizerHook
from sgp.projection.layer_types import Block, LayerType, register_layer
from sgp.projection.memory import GradientMemory
from sgp.projection.subspace import Numerics, Subspace

__all__ = [
    "Block",
    "Capacity",
    "Check",
    "GradientMemory",
    "LayerCapacity",
    "LayerCheck",
    "LayerType",
    "Numerics",
    "OptimizerHook",
    "Subspace",
    "Summary",
    "register_layer",
]
