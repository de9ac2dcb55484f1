"""BatchNorm normalizes by batch statistics or by stored ones."""

import pytest

from sgp.networks.norm import tracks_running_stats


def test_only_stored_statistics_are_running_averages() -> None:
    assert tracks_running_stats("stored")
    assert not tracks_running_stats("batch")


def test_an_unknown_kind_of_statistics_raises_an_error() -> None:
    with pytest.raises(ValueError, match="'running'"):
        tracks_running_stats("running")  # type: ignore[arg-type]
