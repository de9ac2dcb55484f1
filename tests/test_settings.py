"""Settings accept what their fields declare, and refuse the rest by name, with the value."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from sgp.settings import Range, Settings, check_names, setting


@dataclass(frozen=True)
class Small(Settings):
    """Settings of this test."""

    count: int = setting(3, low=1)
    tasks: int = setting(3, low=1, high=10)
    share: float = setting(0.5, low=0, below=1)
    lr: float = setting(0.1, above=0)
    clip: float = setting(math.inf, above=0, high=math.inf)
    start: float = setting(0.0)
    units: int | dict[str, int] = setting(2, low=0)
    limit: int | None = setting(None, low=2)
    kind: Literal["a", "b"] = "a"
    label: str = "anything"


ACCEPTED = [
    {"count": 1},
    {"tasks": 10},
    {"share": 0},
    {"share": 0.999},
    {"lr": 1e-30},
    {"clip": math.inf},
    {"start": -1e9},
    {"units": 0},
    {"units": {"fc": 0, "conv": 7}},
    {"units": {}},
    {"limit": None},
    {"limit": 2},
    {"kind": "b"},
]
REFUSED = [
    ({"count": 0}, "count must be at least 1, got 0"),
    ({"count": 1.5}, "count must be a whole number, got 1.5"),
    ({"count": True}, "count must be a whole number, got True"),
    ({"tasks": 11}, "tasks must be from 1 to 10, got 11"),
    ({"share": 1.0}, "share must be in [0, 1), got 1.0"),
    ({"share": math.nan}, "share must be in [0, 1), got nan"),
    ({"lr": 0.0}, "lr must be above 0 and finite, got 0.0"),
    ({"lr": math.inf}, "lr must be above 0 and finite, got inf"),
    ({"clip": 0.0}, "clip must be above 0, got 0.0"),
    ({"clip": math.nan}, "clip must be above 0, got nan"),
    ({"start": math.inf}, "start must be finite, got inf"),
    ({"units": -1}, "units must be at least 0, got -1"),
    ({"units": {"fc": 1, "conv": -1}}, "units must be at least 0, got -1"),
    ({"limit": 1}, "limit must be at least 2, got 1"),
    ({"kind": "c"}, "kind must be a or b, got 'c'"),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_inside_the_declared_range_are_accepted(values: dict[str, Any]) -> None:
    Small(**values)


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=str)
def test_other_values_are_refused_with_field_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole message is compared)
        Small(**values)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("accepted", "whole", "words"),
    [
        (Range(low=1), True, "at least 1"),
        (Range(low=1), False, "at least 1 and finite"),
        (Range(above=0, high=1), False, "in (0, 1]"),
        (Range(low=0, high=math.inf), False, "at least 0"),
        (Range(high=5), False, "at most 5"),
        (Range(below=5), False, "below 5"),
        (Range(), False, "finite"),
        (Range(high=math.inf), False, "a number"),
        (Range(low=0, high=2**32 - 1), True, "from 0 to 4294967295"),
    ],
)
def test_a_range_is_described_in_words(accepted: Range, whole: bool, words: str) -> None:
    assert accepted.describe(whole=whole) == words


@pytest.mark.parametrize("names", ["boxing", "boxing,krull", "boxing, krull"])
def test_different_names_are_accepted(names: str) -> None:
    check_names("games", names)


@pytest.mark.parametrize("names", ["", "boxing,", "boxing,boxing", "boxing, boxing"])
def test_missing_and_duplicate_names_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="games must be different names"):
        check_names("games", names)
