"""The rate inside a task: patience as published, constant, and half a cosine."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")

from sgp.experiments.config import SupervisedSettings
from sgp.experiments.schedules import DECAYS, Patience, Schedule, make_schedule


def published(losses: list[float], settings: SupervisedSettings) -> tuple[list[float], int | None]:
    """Return the learning rate of each epoch and the epoch whose weights are kept, as in the published code."""
    best_loss, best_epoch = math.inf, None
    lr, patience = settings.lr, settings.patience
    rates = []
    for epoch in range(settings.epochs):
        if epoch == len(losses):
            break
        rates.append(lr)
        loss = losses[epoch]
        if loss < best_loss:
            best_loss, best_epoch = loss, epoch
            patience = settings.patience
        else:
            patience -= 1
            if patience == 0:
                lr = lr / settings.lr_factor
                if lr < settings.lr_min:
                    break
                patience = settings.patience
    return rates, best_epoch


def observed(schedule: Schedule, losses: list[float]) -> tuple[list[float], int | None]:
    """Return the same for one of our schedules."""
    rates, kept = [], None
    for epoch, loss in enumerate(losses):
        if schedule.done:
            break
        rates.append(schedule.get_lr(0.0))
        if schedule.observe(loss):
            kept = epoch
    return rates, kept


SETTINGS = st.builds(
    SupervisedSettings,
    epochs=st.integers(1, 40),
    lr=st.sampled_from([0.05, 0.01, 1.0]),
    lr_min=st.sampled_from([5e-5, 1e-2, 0.04, 0.5, 5.0]),
    lr_factor=st.sampled_from([2.0, 3.0, 1.5]),
    patience=st.integers(1, 6),
    schedule=st.sampled_from(["patience", *DECAYS]),
)
# Few different values, so that equal losses are common: only a smaller one counts.
LOSSES = st.lists(st.integers(0, 12).map(float), max_size=60)


@given(SETTINGS, LOSSES)
def test_patience_is_the_published_rule(settings: SupervisedSettings, losses: list[float]) -> None:
    assert observed(Patience(settings), losses) == published(losses, settings)


@given(SETTINGS, LOSSES, st.integers(0, 60))
def test_a_schedule_goes_on_from_its_state(settings: SupervisedSettings, losses: list[float], cut: int) -> None:
    whole, stopped, resumed = (make_schedule(settings) for _ in range(3))
    head, _ = observed(stopped, losses[:cut])
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict(), allow_nan=False)))
    tail, _ = observed(resumed, losses[cut:])
    assert head + tail == observed(whole, losses)[0]
    assert resumed == whole


def test_the_settings_of_split_cifar100_stop_at_the_tenth_halving() -> None:
    schedule = Patience(SupervisedSettings(epochs=1000, lr=0.05, lr_min=5e-5, lr_factor=2, patience=6))
    rates, _ = observed(schedule, [1.0] * 1000)
    # One epoch that improves, then ten times six that do not.
    assert len(rates) == 61
    assert len(set(rates)) == 10
    assert schedule.lr == 0.05 / 2**10 < 5e-5 < rates[-1]


def test_a_task_ends_after_all_its_epochs_however_well_it_goes() -> None:
    schedule = Patience(SupervisedSettings(epochs=3))
    assert len(observed(schedule, [3.0, 2.0, 1.0, 0.5])[0]) == 3
    assert schedule.done


def test_a_rate_that_starts_below_the_least_is_trained_with() -> None:
    schedule = Patience(SupervisedSettings(epochs=50, lr=1e-5, lr_min=5e-5, patience=2))
    assert not schedule.done
    assert observed(schedule, [1.0] * 50)[0] == [1e-5] * 3


def test_a_constant_rate_keeps_the_last_weights() -> None:
    schedule = make_schedule(SupervisedSettings(epochs=3, lr=0.1, schedule="constant"))
    assert observed(schedule, [1.0, 0.5, 2.0]) == ([0.1] * 3, None)
    assert schedule.done


def test_a_cosine_goes_from_the_full_rate_to_zero() -> None:
    schedule = make_schedule(SupervisedSettings(epochs=4, lr=0.2, schedule="cosine"))
    rates = []
    while not schedule.done:
        rates += [schedule.get_lr(progress) for progress in (0.0, 0.5)]
        last = schedule.get_lr(1.0)
        assert not schedule.observe(None)
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * step / 8)) for step in range(8)])
    assert rates[0] == 0.2
    assert rates == sorted(rates, reverse=True)
    assert last == pytest.approx(0, abs=1e-12)
    assert schedule.epochs == 4
