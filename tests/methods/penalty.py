"""The quadratic penalty of EWC and SI, written out."""

from typing import Any

import torch
from torch import Tensor

from sgp.methods.quadratic import Quadratic


def compute_penalty(method: Quadratic[Any]) -> Tensor:
    """Compute the penalty of the current weights, with a graph."""
    total = torch.zeros(())
    for name, parameter in method.get_penalized().items():
        if name in method.importance:
            total = total + (method.importance[name] * (parameter - method.anchor[name]).square()).sum()
    return method.stiffness / 2 * total
