"""Buffers: which examples are stored, and that their parts belong together."""

import json
from collections import Counter

import pytest
import torch
from torch import Tensor

from sgp.methods.buffer import Buffer, ClassRings, Draws, Reservoir


def make_rows(numbers: Tensor) -> dict[str, Tensor]:
    """Return examples whose number is in each of two tensors."""
    return {"inputs": numbers.float().unsqueeze(1).repeat(1, 3), "labels": numbers}


def list_stored(buffer: Buffer) -> list[int]:
    """Return the numbers of the stored examples, place by place; inputs and labels must belong together."""
    labels = buffer.contents["labels"]
    assert torch.equal(buffer.contents["inputs"], make_rows(labels)["inputs"])
    return [int(label) for label in labels]


def offer(reservoir: Reservoir, count: int, batch: int) -> None:
    for numbers in torch.arange(count).split(batch):
        reservoir.add(make_rows(numbers))


SIZE, OFFERED, TRIALS = 10, 25, 2000


def compute_chi_square(draws: Draws) -> float:
    """Compute how far from uniform the examples are stored over many reservoirs.

    The counts are alike and sum to a constant, so their covariance is known from the variance of one of them,
    expected (1 - size/offered), and with this scale the sum of squares has the law of a chi-square.
    """
    torch.manual_seed(0)
    counts: Counter[int] = Counter()
    for _ in range(TRIALS):
        reservoir = Reservoir(SIZE, draws)
        offer(reservoir, OFFERED, batch=7)
        counts.update(list_stored(reservoir))
    expected = TRIALS * SIZE / OFFERED
    squares = sum((counts[number] - expected) ** 2 for number in range(OFFERED))
    return squares / (expected * (1 - SIZE / OFFERED)) * (OFFERED - 1) / OFFERED


# Exceeded by a chi-square with 24 degrees of freedom once in a thousand times.
LIMIT = 51.2


def test_a_reservoir_stores_every_example_with_the_same_probability() -> None:
    assert compute_chi_square("uniform") < LIMIT


def test_the_published_reservoir_prefers_later_examples() -> None:
    assert compute_chi_square("one-less") > LIMIT


def test_every_place_of_a_reservoir_is_as_likely_to_be_taken() -> None:
    torch.manual_seed(0)
    counts: Counter[int] = Counter()
    for _ in range(TRIALS):
        reservoir = Reservoir(SIZE)
        offer(reservoir, SIZE + 1, batch=SIZE + 1)
        counts.update(place for place, number in enumerate(list_stored(reservoir)) if number == SIZE)
    expected = TRIALS / (SIZE + 1)
    # A chi-square with 10 degrees of freedom exceeds the limit once in a thousand times; -1 stands for not stored.
    counts[-1] = TRIALS - counts.total()
    assert sum((counts[place] - expected) ** 2 for place in range(-1, SIZE)) / expected < 29.6


def test_the_first_example_that_meets_a_full_reservoir_is_always_taken_as_published_only() -> None:
    torch.manual_seed(0)
    taken = {}
    for draws in ("uniform", "one-less"):
        count = 0
        for _ in range(200):
            reservoir = Reservoir(3, draws)  # type: ignore[arg-type]
            offer(reservoir, 4, batch=2)
            count += 3 in list_stored(reservoir)
        taken[draws] = count
    assert taken["one-less"] == 200
    assert 120 < taken["uniform"] < 180


@pytest.mark.parametrize("batch", [1, 4, 50])
def test_a_reservoir_stores_all_until_it_is_full_and_then_distinct_ones(batch: int) -> None:
    torch.manual_seed(0)
    reservoir = Reservoir(20)
    offer(reservoir, 20, batch)
    assert list_stored(reservoir) == list(range(20))
    reservoir.add(make_rows(torch.arange(20, 50)))
    assert len(reservoir) == len(set(list_stored(reservoir))) == 20
    assert reservoir.seen == 50


def test_a_later_example_of_a_batch_wins_the_place_of_an_earlier_one() -> None:
    """Stored examples depend on the draws only, not on how the offered ones are grouped."""
    for bundle in (1, 3, 12):
        torch.manual_seed(3)
        reservoir = Reservoir(2)
        # One draw for all: a generator returns the same numbers in parts only for some sizes of the parts.
        drawn = torch.rand(12, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            left = iter(drawn.split(bundle))
            patch.setattr(torch, "rand", lambda *_, left=left, **__: next(left))
            offer(reservoir, 12, bundle)
        if bundle == 1:
            expected = list_stored(reservoir)
        assert list_stored(reservoir) == expected


def test_a_draw_has_distinct_examples_and_at_most_all() -> None:
    torch.manual_seed(0)
    reservoir = Reservoir(20)
    offer(reservoir, 8, batch=4)
    drawn = reservoir.draw(5)
    assert len(set(drawn["labels"].tolist())) == 5
    assert torch.equal(drawn["inputs"], make_rows(drawn["labels"])["inputs"])
    assert sorted(reservoir.draw(100)["labels"].tolist()) == list(range(8))


def test_what_is_drawn_is_a_copy() -> None:
    reservoir = Reservoir(4)
    offer(reservoir, 4, batch=4)
    reservoir.draw(4)["labels"].fill_(-1)
    assert list_stored(reservoir) == [0, 1, 2, 3]


def test_inputs_stay_as_the_network_takes_them_and_are_counted_as_such() -> None:
    reservoir = Reservoir(5)
    images = torch.randn(7, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    reservoir.add({"inputs": images, "labels": torch.arange(7)})
    assert reservoir.contents["inputs"].dtype == torch.float32
    assert reservoir.count_bytes() == {"inputs": 5 * 3 * 4 * 4 * 4, "labels": 5 * 8}
    # A file has one memory format, so stored examples have it too; otherwise a resumed run would use another.
    assert reservoir.contents["inputs"].is_contiguous()


def test_graphs_are_not_stored() -> None:
    reservoir = Reservoir(5)
    reservoir.add({"inputs": torch.randn(3, 2, requires_grad=True) * 2})
    assert not reservoir.contents["inputs"].requires_grad


@pytest.mark.parametrize("made", [lambda: Reservoir(6), lambda: ClassRings(6)], ids=["reservoir", "rings"])
def test_a_buffer_resumes_from_its_state(made: type[Reservoir] | type[ClassRings]) -> None:
    def add(buffer: Reservoir | ClassRings, start: int, task: int) -> None:
        torch.manual_seed(start)
        numbers = torch.arange(start, start + 9)
        if isinstance(buffer, ClassRings):
            buffer.add(make_rows(numbers), numbers % 2, task)
        else:
            buffer.add(make_rows(numbers))

    whole, stopped, resumed = made(), made(), made()
    for buffer in (whole, stopped):
        add(buffer, 0, task=0)
    state = stopped.state_dict()
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "contents"}))
    resumed.load_state_dict(plain | {"contents": state["contents"]})
    add(stopped, 50, task=1)
    assert list_stored(resumed) == list_stored(whole)  # has its own tensors
    for buffer in (whole, resumed):
        add(buffer, 9, task=1)
    assert list_stored(whole) == list_stored(resumed)
    if isinstance(whole, ClassRings) and isinstance(resumed, ClassRings):
        assert torch.equal(whole.find_other_tasks(1), resumed.find_other_tasks(1))


def list_other_tasks(rings: ClassRings, task: int) -> list[int]:
    """Return the numbers of the stored examples of all tasks but one."""
    return sorted(rings.take(rings.find_other_tasks(task))["labels"].tolist())


def test_rings_store_the_latest_of_each_class() -> None:
    rings = ClassRings(6, per_class=2)
    for numbers in torch.arange(30).split(7):
        rings.add(make_rows(numbers), numbers % 3, task=0)
    assert list_other_tasks(rings, task=1) == [24, 25, 26, 27, 28, 29]


def test_classes_share_the_memory_evenly_and_drop_the_oldest() -> None:
    rings = ClassRings(7)
    numbers = torch.arange(20)
    rings.add(make_rows(numbers), numbers % 2, task=0)
    # Four places for the even numbers, three for the odd ones.
    assert list_other_tasks(rings, task=1) == [12, 14, 15, 16, 17, 18, 19]
    rings.add(make_rows(numbers + 20), numbers % 2, task=1)
    # Four classes in seven places: two each, and one for the last.
    assert list_other_tasks(rings, task=1) == [16, 17, 18, 19]
    assert list_other_tasks(rings, task=0) == [36, 38, 39]
    assert len(rings) == 7


def test_the_same_label_in_another_task_is_another_class() -> None:
    rings = ClassRings(8, per_class=2)
    for task in range(3):
        numbers = torch.arange(10) + 10 * task
        rings.add(make_rows(numbers), torch.zeros(10, dtype=torch.long), task)
    assert list_other_tasks(rings, task=9) == [8, 9, 18, 19, 28, 29]
    assert list_other_tasks(rings, task=1) == [8, 9, 28, 29]


def test_rings_never_exceed_their_size_with_more_classes_than_places() -> None:
    rings = ClassRings(3)
    numbers = torch.arange(40)
    for _ in range(2):
        rings.add(make_rows(numbers), numbers % 5, task=0)
    assert len(rings) == 3
    assert list_other_tasks(rings, task=1) == [35, 36, 37]
    rings = ClassRings(3, per_class=2)
    rings.add(make_rows(numbers), numbers % 5, task=0)
    assert len(rings) == 3


def test_rings_of_one_class_use_all_of_the_memory() -> None:
    rings = ClassRings(5)
    rings.add(make_rows(torch.arange(9)), torch.zeros(9, dtype=torch.long), task=0)
    assert list_other_tasks(rings, task=1) == [4, 5, 6, 7, 8]
    assert list_other_tasks(rings, task=0) == []
