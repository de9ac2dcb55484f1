"""Keeps the running statistics of norm layers where they are while other tasks train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

# As for watched inputs, nothing is left on the modules themselves, and nobody is kept alive.
_holding: WeakSet[FrozenNormStatistics] = WeakSet()
_hooks: list[RemovableHandle] = []


class FrozenNormStatistics:
    """Running statistics as they were after the first task, put back after every forward in training mode.

    A frozen norm layer still counts the batches it sees: its statistics drift to the new task's, and old
    outputs with them, though no parameter moves. A forward inside a compiled graph is not seen, so they are
    put back after each step too.

    Attributes:
        users: Attached optimizer hooks; while there is none, the statistics are left alone.
    """

    def __init__(self) -> None:
        self.users: WeakSet[object] = WeakSet()
        self._names: dict[nn.Module, str] = {}
        self._values: dict[str, dict[str, Tensor]] = {}

    def freeze(self, modules: Mapping[str, nn.Module]) -> None:
        """Hold these modules, and no others, at the values they have when they are first given."""
        self._names = {module: name for name, module in modules.items()}
        for module, name in self._names.items():
            if name not in self._values:
                buffers = module.named_buffers(recurse=False)
                self._values[name] = {key: buffer.detach().clone() for key, buffer in buffers}
        if self._names:
            _holding.add(self)
            if not _hooks:
                _hooks.append(register_module_forward_hook(_after_forward))

    def restore(self) -> None:
        """Put all values back, if an optimizer is attached; else they are anybody's."""
        if self.users:
            for module, name in self._names.items():
                self._restore(module, name)

    def after_forward(self, module: nn.Module) -> None:
        """Put one module's values back, if it is held."""
        name = self._names.get(module)
        if name is not None and module.training and self.users:
            self._restore(module, name)

    def state_dict(self) -> dict[str, Tensor]:
        """All values by qualified buffer name."""
        return {f"{name}.{key}": value for name, values in self._values.items() for key, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
        """Values of :meth:`state_dict`; the modules follow with :meth:`freeze`.

        Raises:
            ValueError: they do not fit the model. Nothing has changed then.
        """
        buffers = dict(model.named_buffers(remove_duplicate=False))
        values: dict[str, dict[str, Tensor]] = {}
        for qualified, value in state.items():
            if qualified not in buffers:
                raise ValueError(f"the running statistic {qualified!r} of the saved memory is not in the model")
            if buffers[qualified].shape != value.shape:
                raise ValueError(
                    f"running statistic {qualified!r}: the saved memory has shape {tuple(value.shape)}, the "
                    f"model {tuple(buffers[qualified].shape)}"
                )
            name, _, key = qualified.rpartition(".")
            values.setdefault(name, {})[key] = value
        self._values, self._names = values, {}

    def _restore(self, module: nn.Module, name: str) -> None:
        for key, value in self._values[name].items():
            buffer = getattr(module, key)
            if value.device != buffer.device:  # the model has moved, or the values are those of a file
                value = self._values[name][key] = value.to(buffer.device)
            # .data: the buffer stands in the graph of the forward that just ran, which does not use its
            # value.
            buffer.data.copy_(value)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for statistics in list(_holding):
        statistics.after_forward(module)
    if not _holding:  # not as soon as the last is collected, which may be in the middle of a compilation
        while _hooks:
            _hooks.pop().remove()
