"""A network says which shapes it takes when it gets another."""

import pytest

from sgp.networks.shape import refuse_other_shapes


def test_a_wrong_shape_is_refused_with_those_that_are_right() -> None:
    refuse_other_shapes("AlexNet", (3, 32, 32), [(3, 32, 32)])
    with pytest.raises(
        ValueError, match=r"AlexNet takes inputs of shape \(3, 32, 32\) or \(3, 84, 84\), got \(1, 8, 8\)"
    ):
        refuse_other_shapes("AlexNet", (1, 8, 8), [(3, 32, 32), (3, 84, 84)])
