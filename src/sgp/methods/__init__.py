"""Methods of continual learning, one file each."""

from typing import Any

from sgp.methods.a_gem import AGEM
from sgp.methods.apd import APD
from sgp.methods.blip import BLIP
from sgp.methods.den import DEN
from sgp.methods.der import DER
from sgp.methods.er import ER
from sgp.methods.ewc import EWC
from sgp.methods.finetune import Finetune
from sgp.methods.frozen import Frozen
from sgp.methods.fs_dgpm import FSDGPM
from sgp.methods.gpm import GPM
from sgp.methods.hat import HAT
from sgp.methods.lora import LoRA
from sgp.methods.method import Batch, Method, Moment, NoSettings
from sgp.methods.multitask import Multitask
from sgp.methods.osf import OSF
from sgp.methods.owm import OWM
from sgp.methods.pnn import PNN
from sgp.methods.rcl import RCL
from sgp.methods.sgp import SGP
from sgp.methods.si import SI
from sgp.methods.stl import STL
from sgp.methods.trgp import TRGP
from sgp.registry import Registry

METHODS: Registry[type[Method[Any]]] = Registry("method")
METHODS.add("finetune", Finetune)
METHODS.add("multitask", Multitask)
METHODS.add("stl", STL)
METHODS.add("a-gem", AGEM)
METHODS.add("er", ER)
METHODS.add("der", DER)
METHODS.add("ewc", EWC)
METHODS.add("si", SI)
METHODS.add("blip", BLIP)
METHODS.add("hat", HAT)
METHODS.add("den", DEN)
METHODS.add("rcl", RCL)
METHODS.add("owm", OWM)
METHODS.add("gpm", GPM)
METHODS.add("sgp", SGP)
METHODS.add("trgp", TRGP)
METHODS.add("fs-dgpm", FSDGPM)
METHODS.add("pnn", PNN)
METHODS.add("apd", APD)
METHODS.add("frozen", Frozen)
METHODS.add("lora", LoRA)
METHODS.add("osf", OSF)

__all__ = ["METHODS", "Batch", "Method", "Moment", "NoSettings"]
