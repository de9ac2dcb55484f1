"""Registries of objects by name, with entry points of other packages."""

from importlib.metadata import EntryPoint

import pytest

import sgp.registry
from sgp.registry import Registry, UnknownName


class Entry:
    """An entry point of another package that records when it is loaded."""

    def __init__(self, name: str, thing: object) -> None:
        self.name = name
        self.thing = thing
        self.loads = 0

    def load(self) -> object:
        self.loads += 1
        return self.thing


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Entry]]:
    """Return the entry points of other packages by group, and record the groups that are looked up."""
    groups: dict[str, list[Entry]] = {}
    monkeypatch.setattr(sgp.registry, "entry_points", lambda group: groups.setdefault(group, []))
    return groups


@pytest.fixture
def fruit(asked: dict[str, list[Entry]]) -> Registry[object]:
    registry: Registry[object] = Registry("fruit")
    for name in ("apple", "pear", "orange"):
        registry.add(name, name.upper())
    return registry


def test_a_name_returns_its_object_and_names_keep_their_order(fruit: Registry[object]) -> None:
    assert fruit["pear"] == "PEAR"
    assert list(fruit) == ["apple", "pear", "orange"]
    assert "pear" in fruit
    assert "plum" not in fruit
    assert 3 not in fruit


def test_an_unknown_name_is_refused_with_the_nearest_names(fruit: Registry[object]) -> None:
    with pytest.raises(UnknownName, match=r"^there is no fruit 'appel': did you mean apple\?$"):
        fruit["appel"]


def test_without_a_near_name_all_names_are_listed(fruit: Registry[object]) -> None:
    with pytest.raises(UnknownName, match=r"^there is no fruit 'zzz'; there are apple, orange, pear$"):
        fruit["zzz"]


def test_an_unknown_name_is_a_value_error() -> None:
    assert issubclass(UnknownName, ValueError)


def test_a_registered_name_is_refused(fruit: Registry[object]) -> None:
    with pytest.raises(ValueError, match="the fruit 'apple' is already registered"):
        fruit.add("apple", "another")
    assert fruit["apple"] == "APPLE"


def test_the_same_object_may_be_added_twice(fruit: Registry[object]) -> None:
    thing = fruit["apple"]
    fruit.add("apple", thing)
    assert fruit["apple"] is thing


def test_entry_points_are_loaded_at_the_first_lookup(asked: dict[str, list[Entry]]) -> None:
    entry = Entry("plum", "PLUM")
    registry: Registry[object] = Registry("fruit")
    asked["sgp.fruits"] = [entry]
    registry.add("apple", "APPLE")
    assert entry.loads == 0
    assert registry["plum"] == "PLUM"
    assert list(registry) == ["apple", "plum"]
    assert registry["plum"] == "PLUM"
    assert entry.loads == 1


@pytest.mark.parametrize("ask", [list, lambda registry: "plum" in registry], ids=["iterating", "membership"])
def test_iteration_and_membership_include_entry_points(ask: object, asked: dict[str, list[Entry]]) -> None:
    asked["sgp.fruits"] = [Entry("plum", "PLUM")]
    registry: Registry[object] = Registry("fruit")
    assert ask(registry)  # type: ignore[operator]


def test_an_entry_point_cannot_replace_a_registered_name(asked: dict[str, list[Entry]]) -> None:
    intruder = Entry("apple", "something else")
    asked["sgp.fruits"] = [intruder]
    registry: Registry[object] = Registry("fruit")
    registry.add("apple", "APPLE")
    assert registry["apple"] == "APPLE"
    assert intruder.loads == 0


def test_an_entry_point_that_fails_to_load_affects_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_package:thing", "sgp.toys")
    monkeypatch.setattr(sgp.registry, "entry_points", lambda group: [broken] if group == "sgp.toys" else [])
    toys: Registry[int] = Registry("toy")
    toys.add("ball", 1)
    assert list(toys) == ["ball", "broken"]
    assert toys["ball"] == 1
    with pytest.raises(ValueError, match=r"'broken' \(no_such_package:thing\) cannot be loaded"):
        toys["broken"]


def test_nearest_names_ignore_case(fruit: Registry[object]) -> None:
    with pytest.raises(UnknownName, match="did you mean apple"):
        fruit["APPLE"]
