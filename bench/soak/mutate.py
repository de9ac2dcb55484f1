"""Random damage to bytes, to lines of text, and to values of otherwise well-formed files."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Values that replace a value of another type.
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "", "a" * 300, "\0", "../..", "ä", "sgp", "digits"),
    *([], {}, [[]], [None], {"a": 1}, {"event": "task"}, [1, 2, 3]),
)


def mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    """Return damaged bytes: flipped bits, or a part that is missing, repeated, zero or random."""
    start = generator.randrange(len(data) + 1)
    end = min(len(data), start + generator.choice((1, 8, 100, len(data))))
    part = data[start:end]
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: data[:start],
        lambda: data[:start] + data[end:],
        lambda: data[:end] + part + data[end:],
        lambda: data[:start] + bytes(len(part)) + data[end:],
        lambda: data[:start] + generator.randbytes(len(part)) + data[end:],
        lambda: data[:start] + bytes(byte ^ (1 << generator.randrange(8)) for byte in part[:1]) + data[start + 1 :],
        lambda: b"",
    )
    return generator.choice(kinds)()


def mutate_lines(data: bytes, generator: random.Random) -> bytes:
    """Return a text with a line that is missing, repeated, moved or cut."""
    lines = data.splitlines(keepends=True) or [b"\n"]
    position = generator.randrange(len(lines))
    kind = generator.choice(("remove", "repeat", "move", "cut"))
    if kind == "cut":
        lines[position] = lines[position][: generator.randrange(len(lines[position]))]
    elif kind == "repeat":
        lines.insert(generator.randrange(len(lines)), lines[position])
    else:
        line = lines.pop(position)
        if kind == "move":
            lines.insert(generator.randrange(len(lines) + 1), line)
    return b"".join(lines)


def mutate_value(value: Any, generator: random.Random) -> Any:
    """Return a copy of nested dicts and lists with one change at a random place."""
    value = copy.deepcopy(value)
    places = list(_list_places(value))
    if not places:
        return generator.choice(JUNK)
    container, key = generator.choice(places)
    item = container[key]
    if isinstance(item, Tensor):
        container[key] = _mutate_tensor(item, generator)
        return value
    kind = generator.choice(("replace", "replace", "remove", "swap", "rename"))
    if kind == "replace":
        container[key] = copy.deepcopy(generator.choice(JUNK))
    elif kind == "swap":
        other, name = generator.choice(places)
        container[key] = copy.deepcopy(other[name])
    else:
        del container[key]
        if kind == "rename" and isinstance(container, dict):
            container[f"{key}x"] = item
    return value


def mutate_json(data: bytes, generator: random.Random) -> bytes:
    """Return JSON with one change at a random place; of JSON lines, one line changes."""
    lines = data.splitlines(keepends=True)
    position = generator.randrange(len(lines))
    try:
        lines[position] = json.dumps(mutate_value(json.loads(lines[position]), generator)).encode() + b"\n"
        return b"".join(lines)
    except ValueError:  # a single value over several lines
        return json.dumps(mutate_value(json.loads(data), generator), indent=2).encode()


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place inside a value, as its container and its key there."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        return [place for key in keys for place in [(value, key), *_list_places(value[key])]]
    return []


def _mutate_tensor(tensor: Tensor, generator: random.Random) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: tensor.flatten(),
        lambda: tensor[:-1] if tensor.dim() and len(tensor) else tensor.reshape(1),
        lambda: tensor.unsqueeze(0),
        lambda: torch.zeros(0),
        lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor.expand(3).clone(),
        lambda: tensor.double() if tensor.is_floating_point() else tensor.float(),
        lambda: tensor.to(torch.int64),
        lambda: tensor.bool(),
        lambda: generator.choice(JUNK),
    )
    return generator.choice(kinds)()
