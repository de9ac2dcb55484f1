"""Methods of continual learning, one file each."""

from typing import Any

from sgp.methods.finetune import Finetune
from sgp.methods.gpm import GPM
from sgp.methods.method import Batch, Method, NoSettings
from sgp.methods.sgp import SGP
from sgp.methods.supervised import Joint, Moment, Supervised
from sgp.registry import Registry

METHODS: Registry[type[Method[Any]]] = Registry("method")
METHODS.add("finetune", Finetune)
METHODS.add("gpm", GPM)
METHODS.add("sgp", SGP)

__all__ = ["METHODS", "Batch", "Joint", "Method", "Moment", "NoSettings", "Supervised"]
