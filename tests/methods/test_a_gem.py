"""A-GEM: no step raises the loss on the memory to first order, and a harmless gradient does not change."""

from typing import Any

import pytest
import torch
from methods.replay import make_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from sgp.methods import Batch, Moment
from sgp.methods.a_gem import AGEM, AGEMSettings, project_gradients
from sgp.networks import MLP

NOW, LATER = Moment(0, 0.0, 0.0), Moment(1, 0.0, 0.5)


def make_method(heads: tuple[int, ...] = (3, 3), **settings: Any) -> AGEM:
    torch.manual_seed(0)
    return AGEM(MLP((12, 16), heads), AGEMSettings(**settings), exclude=["heads.*"])


def fill_memory(method: AGEM, examples: Batch, head: int = 0) -> AGEM:
    """Store a batch in the memory, and restore the weights."""
    method.step(examples, head, NOW, SGD(method.network.parameters(), lr=0.0))
    return method


def compute_gradient(network: nn.Module, examples: Batch, head: int) -> Tensor:
    """Compute the gradient of the mean loss for all weights, as one vector in float64."""
    loss = F.cross_entropy(network(examples[0], head), examples[1])
    found = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
    return torch.cat([part.flatten() for part in found]).double()


def copy_weights(network: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in network.parameters()]).double()


def flip_labels(examples: Batch) -> Batch:
    """Return the same inputs with other labels, which pull the other way."""
    return examples[0], (examples[1] + 1) % 3


@pytest.mark.parametrize("shared", [False, True], ids=["heads of their own", "one head"])
def test_a_step_never_raises_the_loss_on_the_memory_to_first_order(shared: bool) -> None:
    heads = (3,) if shared else (3, 3)
    conflicts = 0
    for seed in range(30):
        old, new = make_batch(seed), make_batch(100 + seed)
        # Half of the tasks contradict the memory outright.
        method = fill_memory(make_method(heads), old)
        new = flip_labels(old) if seed % 2 else new
        reference, g = compute_gradient(method.network, old, 0), compute_gradient(method.network, new, 1)
        before = copy_weights(method.network)
        method.step(new, 1, NOW, SGD(method.network.parameters(), lr=1.0))
        taken = before - copy_weights(method.network)
        assert taken @ reference >= -1e-6 * taken.norm() * reference.norm()
        if g @ reference < 0:
            conflicts += 1
            expected = g - (g @ reference) / (reference @ reference) * reference
            torch.testing.assert_close(taken, expected, atol=1e-6, rtol=1e-5)
        else:
            torch.testing.assert_close(taken, g, atol=1e-6, rtol=1e-5)
    assert 3 < conflicts < 30


def test_a_gradient_aligned_with_the_reference_does_not_change() -> None:
    weight, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    weight.grad, other.grad = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.1, 0.2])
    for reference in (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3)):
        project_gradients([weight, other], [reference, None])
        assert weight.grad.tolist() == [1.0, -2.0, 0.5]
        assert torch.equal(other.grad, torch.tensor([0.1, 0.2]))


def test_the_gradient_is_projected_as_one_vector() -> None:
    """The first weight alone would be aligned; together they are not, so both change."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([1.0]), torch.tensor([-3.0])
    project_gradients([first, second], [torch.tensor([1.0]), torch.tensor([1.0])])
    assert (first.grad.tolist(), second.grad.tolist()) == ([2.0], [-2.0])


def test_weights_that_only_the_memory_reaches_move_too() -> None:
    reached, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    reached.grad = torch.tensor([-2.0])
    project_gradients([reached, other], [torch.tensor([1.0]), torch.tensor([1.0])])
    assert reached.grad.tolist() == [-1.0]
    assert other.grad is not None
    assert other.grad.tolist() == [1.0]


def test_a_reference_whose_length_rounds_to_zero_is_ignored() -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([-1.0])
    project_gradients([weight], [torch.tensor([1e-30])])
    assert weight.grad.tolist() == [-1.0]


def test_the_first_task_is_plain_sgd() -> None:
    method, plain = make_method(), make_method()
    ours, theirs = (SGD(each.network.parameters(), lr=0.1) for each in (method, plain))
    for seed in range(4):
        method.step(make_batch(seed), 0, NOW, ours)
        theirs.zero_grad()
        plain.compute_loss(make_batch(seed), 0, NOW).backward()  # type: ignore[no-untyped-call]
        theirs.step()
    assert torch.equal(copy_weights(method.network), copy_weights(plain.network))
    assert len(method.buffer) > 0


def test_the_memory_is_learned_through_its_own_heads() -> None:
    """The reference has a gradient in the old head, and none in the new one."""
    old = make_batch(1)
    method = fill_memory(make_method(), old)
    reference = compute_gradient(method.network, old, 0)
    drawn = method.buffer.take(method.buffer.find_other_tasks(1))
    loss = method._compute_replay_loss(drawn, like=old[0])
    found = torch.autograd.grad(loss, list(method.network.parameters()), materialize_grads=True)
    torch.testing.assert_close(torch.cat([part.flatten() for part in found]).double(), reference)


@pytest.mark.parametrize(("memory_batch", "count"), [(None, 8), (5, 5), (100, 20)])
def test_a_draw_has_the_set_size_or_that_of_the_batch(memory_batch: int | None, count: int) -> None:
    method = fill_memory(make_method(memory_batch=memory_batch), make_batch(1, 20))
    sizes: list[int] = []
    method.network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    method.step(make_batch(2), 1, NOW, SGD(method.network.parameters(), lr=0.1))
    assert sizes == [count, 8]


def test_the_returned_loss_is_the_loss_of_the_batch() -> None:
    method = fill_memory(make_method(), make_batch(1))
    new = make_batch(2)
    expected = F.cross_entropy(method.network(new[0], 1), new[1]).item()
    assert method.step(new, 1, NOW, SGD(method.network.parameters(), lr=0.1)) == pytest.approx(expected)


def test_examples_are_offered_in_the_first_epoch_of_a_task_or_in_every_one() -> None:
    for fill, kept in (("first-epoch", make_batch(1)), ("every-epoch", make_batch(2))):
        method = make_method(fill=fill, per_class=1, memory_size=3)
        optimizer = SGD(method.network.parameters(), lr=0.1)
        method.step(make_batch(1), 0, NOW, optimizer)
        method.step(make_batch(2), 0, LATER, optimizer)
        latest = {tuple(kept[0][kept[1] == label][-1].tolist()) for label in kept[1].unique().tolist()}
        assert {tuple(row) for row in method.buffer.contents["inputs"].tolist()} == latest


def test_bytes_are_those_of_inputs_labels_and_heads() -> None:
    method = fill_memory(make_method(memory_size=10), make_batch(1, 40))
    assert method.count_bytes() == {"data": 10 * (12 * 4 + 8 + 8)}
    assert method.keeps_data
