"""New measurements replace the old ones."""

from bench.__main__ import merged


def test_a_measurement_of_some_leaves_the_others_in_their_places() -> None:
    old = [{"name": "step", "ratio": 2.0}, {"name": "update", "ratio": 3.0}, {"name": "peak", "ratio": 4.0}]
    new = [{"name": "texts", "ratio": 1.0}, {"name": "update", "ratio": 0.5}]
    assert merged(old, new) == [old[0], new[1], old[2], new[0]]
