"""Batches of every kind, masks, and evaluation passes that leave no trace on the model."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from projection.collecting import (
    KINDS,
    Keywords,
    Noisy,
    X,
    assert_is_gram_of,
    assert_same_trace,
    collect_grams,
    images,
    loaders,
    trace,
    trained_net,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fail_at", [None, 9])
@pytest.mark.parametrize("budget", [2**30, 1])
def test_an_update_leaves_no_trace_even_if_the_loader_fails_midway(kind: str, fail_at: int | None, budget: int) -> None:
    model, generator = trained_net(), torch.Generator().manual_seed(5)
    loader = loaders(Noisy(images(12), fail_at), generator)[kind]
    memory = sgp.GradientMemory(model, threshold=0.9)
    before = trace(model, generator)
    if fail_at is None:
        memory.update(loader, budget=budget)
        assert memory.tasks == 1
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            memory.update(loader, budget=budget)
        assert memory.tasks == 0
        assert not memory.subspaces
    assert_same_trace(before, trace(model, generator))


def test_a_forward_that_trains_does_not_move_running_statistics() -> None:
    model, generator = trained_net(), torch.Generator()
    before = trace(model, generator)
    collect_grams(model, [images(4)], forward=lambda x: model.train()(x))
    assert_same_trace(before, trace(model, generator))


def test_the_next_epoch_of_a_shuffling_loader_is_the_one_it_would_have_been() -> None:
    def epochs(update: bool) -> list[Tensor]:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(images(12)), 4, shuffle=True)
        first = [batch[0] for batch in loader]
        if update:
            collect_grams(trained, loader)
        return first + [batch[0] for batch in loader]

    trained = trained_net()
    torch.testing.assert_close(epochs(True), epochs(False), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batch", "forward", "scale"),
    [
        (X, None, 1.0),
        ((X, torch.zeros(6)), None, 1.0),
        ([X, torch.zeros(6)], None, 1.0),
        ((X,), None, 1.0),
        ({"x": X}, None, 1.0),
        ({"x": X, "scale": 2.0}, None, 2.0),
        (("anything", {"deep": X}), lambda model, batch: model(batch[1]["deep"], 3.0), 3.0),
    ],
)
def test_a_batch_may_be_a_tensor_a_tuple_a_list_a_dict_or_anything_with_forward(
    batch: Any, forward: Callable[..., Tensor] | None, scale: float
) -> None:
    model = Keywords()
    run = None if forward is None else lambda b: forward(model, b)
    found = collect_grams(model, [batch], forward=run)
    assert found["fc"].count == 6
    assert_is_gram_of(found["fc"], X * scale)


@pytest.mark.parametrize("batch", ["text", 3, (), None])
def test_a_batch_of_another_kind_is_refused_and_the_message_tells_what_would_do(batch: Any) -> None:
    with pytest.raises(ValueError, match=f"{type(batch).__name__} is not understood.*forward="):
        collect_grams(Keywords(), [batch])


def test_samples_of_a_loader_that_does_not_shuffle_give_a_warning_in_the_users_line() -> None:
    memory = sgp.GradientMemory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), threshold=0.9)
    loader = DataLoader(TensorDataset(X), 2)
    with pytest.warns(UserWarning, match="does not shuffle") as caught:
        memory.update(loader, samples=3)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="does not shuffle"):
        memory.update(loader, samples={"0": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_loader_that_shuffles_give_no_warning(kind: str) -> None:
    memory = sgp.GradientMemory(Keywords(), threshold=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.update(loaders(TensorDataset(X), torch.Generator())[kind], samples=3)
        memory.update(DataLoader(TensorDataset(X), 2))
        memory.update([X], samples=3)
