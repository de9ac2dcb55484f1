"""Methods of continual learning, one file each. Importing this package does not import torch."""

from typing import TYPE_CHECKING, Any, TypeAlias

from sgp.lazy import load_lazily
from sgp.methods.facts import MethodFacts, NoSettings
from sgp.methods.settings.a_gem import AGEMFacts
from sgp.methods.settings.apd import APDFacts
from sgp.methods.settings.blip import BLIPFacts
from sgp.methods.settings.den import DENFacts
from sgp.methods.settings.der import DERFacts
from sgp.methods.settings.er import ERFacts
from sgp.methods.settings.ewc import EWCFacts
from sgp.methods.settings.finetune import FinetuneFacts
from sgp.methods.settings.frozen import FrozenFacts
from sgp.methods.settings.fs_dgpm import FSDGPMFacts
from sgp.methods.settings.gpm import GPMFacts
from sgp.methods.settings.hat import HATFacts
from sgp.methods.settings.lora import LoRAFacts
from sgp.methods.settings.multitask import MultitaskFacts
from sgp.methods.settings.osf import OSFFacts
from sgp.methods.settings.owm import OWMFacts
from sgp.methods.settings.pnn import PNNFacts
from sgp.methods.settings.rcl import RCLFacts
from sgp.methods.settings.sgp import SGPFacts
from sgp.methods.settings.si import SIFacts
from sgp.methods.settings.stl import STLFacts
from sgp.methods.settings.trgp import TRGPFacts
from sgp.registry import Registry

if TYPE_CHECKING:
    from sgp.methods.method import Batch, Method, Moment


MethodType: TypeAlias = "type[Method[Any]]"


class MethodRegistry(Registry[MethodType]):
    """Methods by name, whose facts are known before they are imported."""

    def __init__(self) -> None:
        super().__init__("method")
        self._facts: dict[str, type[MethodFacts]] = {}

    def declare_method(self, facts: type[MethodFacts], target: str) -> None:
        """Register a method that is imported when it is asked for.

        Args:
            facts: Facts of the method.
            target: Module and class, as in "sgp.methods.gpm:GPM".
        """
        self.declare(facts.name, target)
        self._facts[facts.name] = facts

    def facts(self, name: str) -> type[MethodFacts]:
        """Return the facts of a method. A method of another package is imported for them."""
        # A file may have a list in place of a name.
        return self._facts[name] if isinstance(name, str) and name in self._facts else self[name]


METHODS = MethodRegistry()
METHODS.declare_method(FinetuneFacts, "sgp.methods.finetune:Finetune")
METHODS.declare_method(MultitaskFacts, "sgp.methods.multitask:Multitask")
METHODS.declare_method(STLFacts, "sgp.methods.stl:STL")
METHODS.declare_method(AGEMFacts, "sgp.methods.a_gem:AGEM")
METHODS.declare_method(ERFacts, "sgp.methods.er:ER")
METHODS.declare_method(DERFacts, "sgp.methods.der:DER")
METHODS.declare_method(EWCFacts, "sgp.methods.ewc:EWC")
METHODS.declare_method(SIFacts, "sgp.methods.si:SI")
METHODS.declare_method(BLIPFacts, "sgp.methods.blip:BLIP")
METHODS.declare_method(HATFacts, "sgp.methods.hat:HAT")
METHODS.declare_method(DENFacts, "sgp.methods.den:DEN")
METHODS.declare_method(RCLFacts, "sgp.methods.rcl:RCL")
METHODS.declare_method(OWMFacts, "sgp.methods.owm:OWM")
METHODS.declare_method(GPMFacts, "sgp.methods.gpm:GPM")
METHODS.declare_method(SGPFacts, "sgp.methods.sgp:SGP")
METHODS.declare_method(TRGPFacts, "sgp.methods.trgp:TRGP")
METHODS.declare_method(FSDGPMFacts, "sgp.methods.fs_dgpm:FSDGPM")
METHODS.declare_method(PNNFacts, "sgp.methods.pnn:PNN")
METHODS.declare_method(APDFacts, "sgp.methods.apd:APD")
METHODS.declare_method(FrozenFacts, "sgp.methods.frozen:Frozen")
METHODS.declare_method(LoRAFacts, "sgp.methods.lora:LoRA")
METHODS.declare_method(OSFFacts, "sgp.methods.osf:OSF")

__all__ = ["METHODS", "Batch", "Method", "MethodFacts", "Moment", "NoSettings"]
__getattr__ = load_lazily(__name__, dict.fromkeys(("Batch", "Method", "Moment"), "sgp.methods.method"))
