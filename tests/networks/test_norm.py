"""What BatchNorm divides by: two choices, and no third."""

import pytest

from sgp.networks.norm import keeps_running


def test_only_stored_statistics_are_running_averages() -> None:
    assert keeps_running("stored")
    assert not keeps_running("batch")


def test_an_unknown_kind_of_statistics_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'running'"):
        keeps_running("running")  # type: ignore[arg-type]
