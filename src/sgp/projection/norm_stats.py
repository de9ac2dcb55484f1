"""Freeze the running statistics of norm layers while later tasks train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

# As in the input mode, the modules have no trace of this, and no object is kept alive.
_active: WeakSet[FrozenNormStatistics] = WeakSet()
_hooks: list[RemovableHandle] = []


class FrozenNormStatistics:
    """Running statistics as of the first task, which are restored after every forward pass in training mode.

    A norm layer whose parameters are frozen still updates its statistics: they drift to those of the new task, and the
    outputs for old inputs with them. A forward pass inside a compiled graph runs no hook, so the statistics are also
    restored after each step.

    Attributes:
        users: Attached optimizer hooks; while there is none, nothing is restored.
    """

    def __init__(self) -> None:
        self.users: WeakSet[object] = WeakSet()
        self._names: dict[nn.Module, str] = {}
        self._values: dict[str, Tensor] = {}  # by qualified buffer name

    def freeze(self, modules: Mapping[str, nn.Module]) -> None:
        """Freeze these modules, and no others, at the values that they have when they are first passed.

        Args:
            modules: Norm layers by qualified name.
        """
        self._names = {module: name for name, module in modules.items()}
        for module, name in self._names.items():
            for key, buffer in module.named_buffers(prefix=name, recurse=False):
                if key not in self._values:
                    self._values[key] = buffer.detach().clone()
        if self._names:
            _active.add(self)
            if not _hooks:
                _hooks.append(register_module_forward_hook(_after_forward))

    def restore(self) -> None:
        """Restore all values, if an optimizer is attached."""
        if self.users:
            for module, name in self._names.items():
                self._restore(module, name)

    def after_forward(self, module: nn.Module) -> None:
        """Restore the values of one module, if it is frozen."""
        name = self._names.get(module)
        if name is not None and module.training and self.users:
            self._restore(module, name)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all values by qualified buffer name."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Take the values of a :meth:`state_dict`; :meth:`freeze` must follow.

        Args:
            state: Values by qualified buffer name.
            model: Model that the buffers belong to.

        Raises:
            ValueError: The values do not fit the model. Nothing has changed then.
        """
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for qualified, value in state.items():
            if qualified not in buffers:
                raise ValueError(f"the running statistic {qualified!r} of the saved memory is not in the model")
            if buffers[qualified].shape != value.shape:
                raise ValueError(
                    f"running statistic {qualified!r}: the saved memory has shape {tuple(value.shape)}, the "
                    f"model {tuple(buffers[qualified].shape)}"
                )
        self._values, self._names = dict(state), {}

    def _restore(self, module: nn.Module, name: str) -> None:
        for leaf, buffer in module._buffers.items():
            key = f"{name}.{leaf}"
            if buffer is None or key not in self._values:
                continue
            value = self._values[key]
            if value.device != buffer.device:  # the model has moved, or the values were loaded
                value = self._values[key] = value.to(buffer.device)
            # The graph of the forward pass that just ran contains the buffer but does not use its value.
            buffer.data.copy_(value)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for statistics in list(_active):
        statistics.after_forward(module)
    if not _active:  # removed here, since the last object may be collected in the middle of a compilation
        while _hooks:
            _hooks.pop().remove()
