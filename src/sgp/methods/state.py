"""State of methods and their parts, as dicts that a checkpoint can store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor


class Stateful:
    """Object whose state is made up of some of its attributes.

    Attributes:
        state_names: Names of these attributes: numbers, strings, tensors, and dicts and lists of these. An underscore
            in front is not part of the name in `state_dict`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs; a method's `trained_module` is stored separately."""
        return {name.removeprefix("_"): _copy_state(getattr(self, name), clone=False) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        for name in self.state_names:
            # Copies of the tensors, since some are changed in place later.
            setattr(self, name, _copy_state(state[name.removeprefix("_")], clone=True))


def _copy_state(value: Any, *, clone: bool) -> Any:
    """Copy dicts and lists, and if asked for the tensors in them."""
    if isinstance(value, Mapping):
        return {key: _copy_state(item, clone=clone) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_state(item, clone=clone) for item in value]
    return value.clone() if clone and isinstance(value, Tensor) else value
