"""A network grows behind its old units, which alone give the old outputs to the bit."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from sgp.networks import MLP, AlexNet, LeNet, ResNet18
from sgp.networks.widen import (
    NEW,
    Axis,
    connect_all_heads,
    find_axes,
    get_sizes,
    mask_new_entries,
    rearrange,
    resize,
    slice_units,
    widen,
)
from sgp.networks.wiring import Wiring, find_wiring

IMAGE = (3, 32, 32)
HEADS = (3, 2)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((12, 16, 8), HEADS),
    "lenet": lambda: LeNet(heads=HEADS),
    "alexnet": lambda: AlexNet(heads=HEADS),
    "alexnet-stored": lambda: AlexNet(heads=HEADS, statistics="stored"),
    "resnet18-stored": lambda: ResNet18(IMAGE, HEADS, statistics="stored"),
}
GROWABLE = {
    "mlp": ["hidden.0", "hidden.1"],
    "lenet": ["conv1", "conv2", "fc1", "fc2"],
    "alexnet": ["conv1", "conv2", "conv3", "fc1", "fc2"],
    "alexnet-stored": ["conv1", "conv2", "conv3", "fc1", "fc2"],
    # What is added to a residual stream keeps its width.
    "resnet18-stored": [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3, 4) for block in (0, 1)],
}


def make_inputs(kind: str, count: int = 4) -> Tensor:
    return torch.randn(count, *((12,) if kind == "mlp" else IMAGE), generator=torch.Generator().manual_seed(3))


def make_network(kind: str, *, last: bool = True) -> tuple[nn.Module, tuple[Axis, ...]]:
    torch.manual_seed(0)
    network = NETWORKS[kind]().eval()
    if last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wiring = find_wiring(network, make_inputs(kind, 2), 0, exclude=["heads.*"])
    return network, find_axes(network, connect_all_heads(wiring, ["heads.*"]))


def make_formatted_inputs(kind: str, last: bool) -> Tensor:
    inputs = make_inputs(kind)
    return inputs.contiguous(memory_format=torch.channels_last) if last and inputs.dim() == 4 else inputs


@torch.no_grad()
def compute_logits(network: nn.Module, inputs: Tensor, tensors: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Compute the logits of every head."""
    return [functional_call(network, dict(tensors or {}), (inputs, head)) for head in range(len(HEADS))]


@pytest.mark.parametrize("kind", NETWORKS)
def test_layers_that_are_the_only_source_of_others_can_grow(kind: str) -> None:
    network, axes = make_network(kind)
    assert list(get_sizes(network, axes)) == GROWABLE[kind]


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_the_first_units_of_a_grown_network_give_the_old_outputs_to_the_bit(kind: str, last: bool) -> None:
    network, axes = make_network(kind, last=last)
    inputs, sizes = make_formatted_inputs(kind, last), get_sizes(network, axes)
    before = compute_logits(network, inputs)
    for more in (3, 2):  # also if it grows twice
        for name in sizes:
            widen(network, axes, name, more)
    assert get_sizes(network, axes) == {name: size + 5 for name, size in sizes.items()}
    grown = compute_logits(network, inputs)
    assert all(not torch.equal(now, then) for now, then in zip(grown, before, strict=True))
    as_it_was = compute_logits(network, inputs, slice_units(network, axes, sizes))
    assert all(torch.equal(now, then) for now, then in zip(as_it_was, before, strict=True))


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_grown_network_is_consistent_and_can_be_trained(kind: str) -> None:
    network, axes = make_network(kind)
    for name in get_sizes(network, axes):
        widen(network, axes, name, 10)
    network.train()
    F.cross_entropy(network(make_inputs(kind), 1), torch.tensor([0, 1, 0, 1])).backward()
    for name in get_sizes(network, axes):
        layer = network.get_submodule(name)
        assert layer.weight.grad[-10:].any(), name
    # The modules have attributes with their sizes, by which equal modules can be created.
    for module in network.modules():
        if isinstance(module, nn.Linear):
            assert (module.out_features, module.in_features) == module.weight.shape
        elif isinstance(module, nn.Conv2d):
            assert (module.out_channels, module.in_channels) == module.weight.shape[:2]
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.num_features == len(module.weight)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_resized_network_loads_the_weights_of_a_grown_one(kind: str) -> None:
    network, axes = make_network(kind)
    for number, name in enumerate(get_sizes(network, axes)):
        widen(network, axes, name, number % 3)
    other, _ = make_network(kind)
    resize(other, axes, get_sizes(network, axes))
    other.load_state_dict(network.state_dict())
    inputs = make_formatted_inputs(kind, last=True)
    assert all(map(torch.equal, compute_logits(other, inputs), compute_logits(network, inputs)))
    assert {name: each.stride() for name, each in other.named_parameters()} == {
        name: each.stride() for name, each in network.named_parameters()
    }


@pytest.mark.parametrize("kind", NETWORKS)
def test_growing_and_shrinking_restores_the_network(kind: str) -> None:
    network, axes = make_network(kind)
    sizes, weights = get_sizes(network, axes), {k: v.clone() for k, v in network.state_dict().items()}
    for name in sizes:
        widen(network, axes, name, 4)
    resize(network, axes, sizes)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_removing_a_unit_with_zero_weights_changes_no_output(kind: str) -> None:
    network, axes = make_network(kind)
    name = list(get_sizes(network, axes))[1]  # LeNet's conv2, whose channels are 64 inputs each of fc1
    with torch.no_grad():
        layer = network.get_submodule(name)
        layer.weight[-1] = 0
        if layer.bias is not None:
            layer.bias[-1] = 0
    before = compute_logits(network, make_inputs(kind))
    rearrange(network, axes, name, torch.arange(get_sizes(network, axes)[name] - 1))
    for now, then in zip(compute_logits(network, make_inputs(kind)), before, strict=True):
        torch.testing.assert_close(now, then)


def test_a_repeated_unit_counts_twice() -> None:
    network, axes = make_network("mlp")
    before = compute_logits(network, make_inputs("mlp"))
    rearrange(network, axes, "hidden.0", torch.tensor([*range(16), 5]))
    with torch.no_grad():
        network.get_submodule("hidden.1").weight[:, [5, 16]] /= 2
    for now, then in zip(compute_logits(network, make_inputs("mlp")), before, strict=True):
        torch.testing.assert_close(now, then)


def test_a_flattened_channel_is_moved_with_all_its_pixels() -> None:
    network, axes = make_network("lenet")
    old = network.get_submodule("fc1").weight.detach().clone()
    rearrange(network, axes, "conv2", torch.tensor([3, NEW, *range(50)]))
    new = network.get_submodule("fc1").weight
    assert new.shape == (800, 64 * 52)
    assert torch.equal(new[:, :64], old[:, 3 * 64 : 4 * 64])
    assert torch.equal(new[:, 128:], old)


def test_new_weights_have_the_mean_square_of_the_old_ones_and_norms_initial_values() -> None:
    network, axes = make_network("alexnet-stored")
    with torch.no_grad():
        network.get_submodule("norm4").weight.fill_(7)
        network.get_submodule("norm4").running_mean.fill_(7)
    widen(network, axes, "fc1", 50)
    weight, norm = network.get_submodule("fc1").weight.detach(), network.get_submodule("norm4")
    assert weight[2048:].square().mean().item() == pytest.approx(weight[:2048].square().mean().item(), rel=0.02)
    assert weight[2048:].abs().max() <= (3 * weight[:2048].square().mean()).sqrt()
    assert norm.weight[2048:].eq(1).all()
    assert norm.bias[2048:].eq(0).all()
    assert norm.running_mean[2048:].eq(0).all()
    assert norm.running_var[2048:].eq(1).all()
    assert norm.weight[:2048].eq(7).all()
    assert norm.running_mean[:2048].eq(7).all()


def test_the_mask_of_new_entries_covers_the_added_units() -> None:
    network, axes = make_network("mlp")
    sizes, old = get_sizes(network, axes), {k: v.clone() for k, v in network.named_parameters()}
    widen(network, axes, "hidden.0", 2)
    masks = mask_new_entries(network, axes, sizes)
    for name, parameter in network.named_parameters():
        assert masks[name].shape == parameter.shape
        assert torch.equal(parameter[~masks[name]], old[name].flatten()), name
    assert masks["hidden.0.bias"].tolist() == [False] * 16 + [True] * 2
    assert masks["hidden.1.weight"][:, 16:].all()
    assert not masks["hidden.1.weight"][:, :16].any()
    assert not masks["heads.0.weight"].any()


def test_a_grouped_convolution_is_left_as_it_is() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 2, 3)
    )
    places = find_wiring(_WithHead(network), torch.randn(2, 3, 12, 12), 0).places
    assert places["body.1"].sources == ("body.0",)
    whole = _WithHead(network)
    assert list(get_sizes(whole, find_axes(whole, Wiring(places)))) == ["body.3"]


class _WithHead(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        out: Tensor = self.body(x)
        return out


def test_a_negative_number_of_new_units_raises_an_error() -> None:
    network, axes = make_network("mlp")
    with pytest.raises(ValueError, match=r"units to add to 'hidden\.0' must be at least 0, got -1"):
        widen(network, axes, "hidden.0", -1)
