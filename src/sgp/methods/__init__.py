"""Methods of continual learning, one file each. Importing this package does not import torch."""

from typing import TYPE_CHECKING, Any, TypeAlias

from sgp.lazy import load_lazily
from sgp.methods.settings import MethodFacts, NoSettings
from sgp.registry import Registry

if TYPE_CHECKING:
    from sgp.methods.method import Batch, Method, Moment


MethodType: TypeAlias = "type[Method[Any]]"


class MethodRegistry(Registry[MethodType]):
    """Methods by name, whose facts are known before they are imported."""

    def __init__(self) -> None:
        super().__init__("method")
        self._facts: dict[str, type[MethodFacts]] = {}

    def declare_method(self, facts: type[MethodFacts]) -> None:
        """Register a method of this package, which is imported when it is asked for."""
        module, kind = facts.name.replace("-", "_"), facts.__name__.removesuffix("Facts")
        self.declare(facts.name, f"sgp.methods.{module}:{kind}")
        self._facts[facts.name] = facts

    def facts(self, name: str) -> type[MethodFacts]:
        """Return the facts of a method. A method of another package is imported for them."""
        # A file may have a list in place of a name.
        return self._facts[name] if isinstance(name, str) and name in self._facts else self[name]


METHODS = MethodRegistry()
for _facts in MethodFacts.__subclasses__():  # those of settings.py
    METHODS.declare_method(_facts)

__all__ = ["METHODS", "Batch", "Method", "MethodFacts", "Moment", "NoSettings"]
__getattr__ = load_lazily(__name__, dict.fromkeys(("Batch", "Method", "Moment"), "sgp.methods.method"))
