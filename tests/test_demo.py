"""The demo in small: its table, its words, and that the memory does what it is for."""

import math

import pytest
import torch
from rich.console import Console

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from sgp.demo import Demo, Outcome, run

SMALL = Demo(seeds=1, tasks=2, epochs=3)


@pytest.fixture(scope="module")
def outcomes_and_output() -> tuple[dict[str, list[Outcome]], str]:
    console = Console(record=True, width=200)
    outcomes = run(console, SMALL)
    return outcomes, console.export_text()


def test_the_table_has_a_row_for_each_method(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, output = outcomes_and_output
    assert list(outcomes) == ["finetuning", "GPM", "SGP"]
    for heading in ("ACC", "BWT", "s per run"):
        assert heading in output
    for method, (outcome,) in outcomes.items():
        row = next(line for line in output.splitlines() if line.startswith("│") and method in line)
        assert f"{outcome.acc:.1f}" in row
        assert f"{outcome.bwt:.1f}" in row


def test_it_says_what_is_seen_and_what_to_do_next(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    *_, seen, following = outcomes_and_output[1].strip().splitlines()
    assert seen.startswith("Seen: ")
    assert following.startswith("Next: ")


def test_sgp_forgets_less_than_finetuning(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, _ = outcomes_and_output
    (finetuning,), (sgp,) = outcomes["finetuning"], outcomes["SGP"]
    assert sgp.bwt > finetuning.bwt + 2
    assert sgp.acc > finetuning.acc


def test_only_methods_with_a_memory_fill_one(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    outcomes, _ = outcomes_and_output
    (finetuning,), (gpm,), (sgp,) = outcomes.values()
    assert finetuning.free is None
    assert gpm.free is not None
    assert sgp.free is not None
    assert 0 < gpm.free < sgp.free < 1


def test_infinite_alpha_makes_sgp_gpm_exactly() -> None:
    outcomes = run(Console(quiet=True), Demo(seeds=1, tasks=2, epochs=1, alpha=math.inf))
    (gpm,), (sgp,) = outcomes["GPM"], outcomes["SGP"]
    assert (gpm.acc, gpm.bwt, gpm.free) == (sgp.acc, sgp.bwt, sgp.free)


def test_it_repeats_itself_and_leaves_threads_and_random_state_alone(
    outcomes_and_output: tuple[dict[str, list[Outcome]], str],
) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    outcomes = run(Console(quiet=True), SMALL)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for method, (outcome,) in outcomes_and_output[0].items():
        assert (outcomes[method][0].acc, outcomes[method][0].bwt) == (outcome.acc, outcome.bwt)


@pytest.mark.parametrize(
    "bad",
    [
        {"seeds": 0},
        {"tasks": 1},
        {"epochs": 0},
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"threshold": 0.0},
        {"threshold": 1.1},
        {"threshold": math.nan},
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(bad: dict[str, float]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        Demo(**bad)  # type: ignore[arg-type]
