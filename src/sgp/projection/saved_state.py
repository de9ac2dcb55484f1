"""Validation of a memory's state before any of it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from sgp.projection.subspace import Numerics

# Value in a file for a threshold that is a function, which cannot be saved.
FUNCTION = "function"
Check = Callable[[Any], bool]


def check_state(state: Mapping[str, Any]) -> None:
    """Raise an error if a state does not have the form of a memory's ``state_dict``.

    Whether the values fit the model is checked when they are loaded.

    Raises:
        ValueError: An entry is missing or has another form; the message names it.
    """
    heading = "this is not the state of a memory of this version"
    missing = [key for key in STATE if key not in state]
    if missing:
        raise ValueError(f"{heading}: it lacks {', '.join(missing)}")
    for key, has_form in STATE.items():
        if not has_form(state[key]):
            raise ValueError(f"{heading}: its {key} are damaged")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_threshold(value: Any) -> bool:
    return (_is_text(value) and value == FUNCTION) or _is_number(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_list_of(has_form: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(has_form, value))


def _is_dict_of(has_form: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(has_form, value.values()))


def _has_settings(value: Any) -> bool:
    """Return whether a value has the settings of a memory; files of older versions may lack newer settings."""
    names = {field.name for field in fields(Numerics)}
    forms: dict[str, Check] = {
        "threshold": lambda v: _is_dict_of(_is_threshold)(v) if isinstance(v, Mapping) else _is_threshold(v),
        "alpha": _is_number,
        "exclude": _is_list_of(_is_text),
        "bias": _is_text,
        "rest": _is_text,
        "numerics": lambda v: _is_dict_of(lambda each: isinstance(each, str | bool))(v) and v.keys() == names,
        "store": _is_text,
        "gram": _is_text,
    }
    if not isinstance(value, Mapping) or not value.keys() <= forms.keys():
        return False
    return {"threshold", "numerics"} <= value.keys() and all(forms[name](each) for name, each in value.items())


def _has_bases(value: Any) -> bool:
    """Return whether a value has the names of some layers and the bases that these share."""
    if not isinstance(value, Mapping) or not _is_list_of(_is_text)(value.get("layers")):
        return False
    shapes = {name: each.dim() for name, each in value.items() if isinstance(each, Tensor)}
    vectors = {"basis": 3, "importance": 2, "rank": 1}
    if shapes not in (vectors, vectors | {"scale": 2}, {"tokens": 1, "importance": 2, "size": 0}):
        return False
    types = {name: value[name].dtype for name in shapes}
    whole = [types[name] == torch.int64 for name in ("rank", "tokens", "size") if name in types]
    return value.keys() == {"layers", *shapes} and types["importance"].is_floating_point and all(whole)


def _is_fingerprint(value: Any) -> bool:
    """Return whether a value is the name of a torch dtype followed by an integer."""
    words = re.fullmatch(r"(\w+) -?\d{1,20}", value) if isinstance(value, str) else None
    return words is not None and isinstance(getattr(torch, words[1], None), torch.dtype)


# Keys of a memory's state dict, with the form of each entry.
STATE: dict[str, Check] = {
    "settings": _has_settings,
    "tasks": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "subspaces": _is_list_of(_has_bases),
    "statistics": _is_dict_of(_is_tensor),
    "fingerprints": _is_dict_of(_is_fingerprint),
    "trained": _is_list_of(_is_text),
    "proved": _is_dict_of(lambda value: isinstance(value, bool)),
}
