"""Projected inputs give the projected gradient, and the proof fails whenever they do not."""

import copy
import gc
import math

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp.projection import OptimizerHook, input_mode


def make_watched_layer(
    alpha: float = 4.0, *, bias: bool = True, outputs: int = 40
) -> tuple[nn.Linear, torch.optim.SGD, sgp.GradientMemory, OptimizerHook]:
    """Return a linear layer whose inputs are replaced from the next step on."""
    torch.manual_seed(0)
    layer = nn.Linear(20, outputs, bias=bias)
    memory = sgp.GradientMemory(layer, threshold=0.9, alpha=alpha)
    memory.update([torch.randn(30, 6) @ torch.randn(6, 20) + 0.5])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    hook = memory.attach(optimizer, mode="input")
    take_step(layer, optimizer, torch.randn(4, 20))
    return layer, optimizer, memory, hook


def take_step(layer: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    layer(x).sin().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 20), (2, 3, 20), (1, 20), (2, 1, 2, 20)])
def test_the_gradient_of_replaced_inputs_is_the_projected_gradient(shape: tuple[int, ...], bias: bool) -> None:
    layer, optimizer, memory, _ = make_watched_layer(bias=bias)
    bare = copy.deepcopy(layer)
    x = torch.randn(shape, requires_grad=True)
    bare(x).sin().sum().backward()
    raw, raw_input = [p.grad.clone() for p in bare.parameters()], x.grad.clone()
    x.grad = None
    optimizer.zero_grad()
    layer(x).sin().sum().backward()
    kept = [p.detach().clone() for p in layer.parameters()]
    optimizer.step()
    joint = torch.cat([g.reshape(40, -1) for g in raw], dim=1)
    M, lam = memory.subspaces["(model)"].basis[0], memory.subspaces["(model)"].importance[0]
    expected = 0.1 * (joint - joint @ (M * lam) @ M.T)
    moved = torch.cat([(k - p.detach()).reshape(40, -1) for k, p in zip(kept, layer.parameters(), strict=True)], dim=1)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(x.grad, raw_input)  # the gradient of earlier layers does not change


def test_inputs_on_another_device_are_not_replaced() -> None:
    layer, optimizer, _, _ = make_watched_layer()
    layer.to("meta")  # in place of an accelerator
    layer(torch.randn(4, 20, device="meta")).sum().backward()
    assert layer.weight.grad is not None
    assert optimizer.param_groups  # inputs are watched while the optimizer exists


def test_the_output_and_the_random_state_do_not_change() -> None:
    layer, optimizer, _, _ = make_watched_layer()
    x = torch.randn(4, 20)
    state = torch.random.get_rng_state()
    torch.testing.assert_close(layer(x), copy.deepcopy(layer)(x))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert optimizer.param_groups  # inputs are watched while the optimizer exists


def test_a_batch_with_more_rows_than_outputs_has_its_gradient_projected() -> None:
    layer = nn.Linear(20, 10)
    memory = sgp.GradientMemory(layer, threshold=0.9)
    memory.update([torch.randn(30, 20)])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    hook = memory.attach(optimizer, mode="input")
    for _ in range(3):
        take_step(layer, optimizer, torch.randn(50, 20))
    assert hook.modes == {"(model)": "gradient"}
    assert "rows" in hook.reasons["(model)"]


def test_no_hook_is_left_when_nothing_is_watched() -> None:
    layer, optimizer, _, hook = make_watched_layer()
    assert input_mode._watched[layer].state == "replace"
    assert input_mode._hooks
    hook.detach()
    assert layer not in input_mode._watched
    assert not input_mode._watched or input_mode._hooks
    raw = torch.autograd.grad(layer(torch.ones(2, 20)).sum(), layer.weight)[0]
    torch.testing.assert_close(raw, torch.full((40, 20), 2.0))
    assert optimizer is not None


def test_an_edited_gradient_is_projected_in_full() -> None:
    layer, optimizer, memory, _ = make_watched_layer(math.inf)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(4, 20)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).sin().sum().backward()
        layer.weight.grad += torch.randn(40, 20)
        optimizer.step()
    assert memory.check(x, reference=before).leak < 1e-5


def test_second_order_gradients_do_not_leak() -> None:
    layer, optimizer, memory, _ = make_watched_layer(math.inf)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for _ in range(5):
        x = torch.randn(4, 20, requires_grad=True)
        optimizer.zero_grad()
        loss = layer(x).sin().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
    assert memory.check(torch.randn(4, 20), reference=before).leak < 1e-5


def test_an_optimizer_that_is_collected_during_a_forward_leaves_nothing_open() -> None:
    layer, optimizer, _, hook = make_watched_layer()
    references = [optimizer]
    del optimizer

    def collect(module: nn.Module, args: object) -> None:
        references.clear()
        gc.collect()

    handle = layer.register_forward_pre_hook(collect)  # runs after the global hook has entered
    layer(torch.randn(2, 20)).sum().backward()
    handle.remove()
    assert not hook.is_attached
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not input_mode._open
