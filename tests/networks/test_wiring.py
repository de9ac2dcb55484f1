"""The wiring is found by running a network; a network in which gates would not hold raises an error."""

import pytest
import torch
from torch import Tensor, nn

from sgp.networks import MLP, AlexNet, LeNet, ResNet18
from sgp.networks.wiring import Place, Wiring, find_wiring, mask_inputs


def find_test_wiring(network: nn.Module, *shape: int) -> Wiring:
    torch.manual_seed(0)
    return find_wiring(network, torch.randn(2, *shape), 0, exclude=["heads.*"])


def select_run_layers(wiring: Wiring) -> dict[str, Place]:
    return {name: place for name, place in wiring.places.items() if name != "heads.1"}


def test_a_perceptron_is_a_chain() -> None:
    wiring = find_test_wiring(MLP((6, 5, 4), (3, 2)), 6)
    assert select_run_layers(wiring) == {
        "hidden.0": Place(None, ()),
        "hidden.1": Place(None, ("hidden.0",)),
        "heads.0": Place(None, ("hidden.1",)),
    }
    assert wiring.gated == ["hidden.0", "hidden.1"]


def test_lenet_is_gated_right_behind_its_layers_and_alexnet_behind_its_norms() -> None:
    assert select_run_layers(find_test_wiring(LeNet(heads=(3, 2)), 3, 32, 32)) == {
        "conv1": Place(None, ()),
        "conv2": Place(None, ("conv1",)),
        "fc1": Place(None, ("conv2",)),
        "fc2": Place(None, ("fc1",)),
        "heads.0": Place(None, ("fc2",)),
    }
    alexnet = find_test_wiring(AlexNet(heads=(3, 2)), 3, 32, 32)
    assert select_run_layers(alexnet) == {
        "conv1": Place("norm1", ()),
        "conv2": Place("norm2", ("conv1",)),
        "conv3": Place("norm3", ("conv2",)),
        "fc1": Place("norm4", ("conv3",)),
        "fc2": Place("norm5", ("fc1",)),
        "heads.0": Place(None, ("fc2",)),
    }
    assert (alexnet.get_gate("fc1"), find_test_wiring(LeNet(), 3, 32, 32).get_gate("fc1")) == ("norm4", "fc1")


def test_a_residual_stream_is_fed_by_all_layers_that_are_added_to_it() -> None:
    places = find_test_wiring(ResNet18((3, 32, 32), (3, 2)), 3, 32, 32).places
    assert places["conv1"] == Place("norm1", ())
    assert places["layer1.0.conv1"].sources == ("conv1",)
    assert places["layer1.0.conv2"] == Place("layer1.0.norm2", ("layer1.0.conv1",))
    assert places["layer1.1.conv1"].sources == ("conv1", "layer1.0.conv2")
    stage = ("conv1", "layer1.0.conv2", "layer1.1.conv2")
    assert places["layer2.0.conv1"].sources == places["layer2.0.shortcut.0"].sources == stage
    assert places["layer2.0.shortcut.0"].norm == "layer2.0.shortcut.1"
    assert places["layer2.1.conv1"].sources == ("layer2.0.conv2", "layer2.0.shortcut.0")
    assert places["heads.0"].sources == ("layer4.0.conv2", "layer4.0.shortcut.0", "layer4.1.conv2")


def test_a_wiring_is_restored_from_its_dictionary() -> None:
    wiring = find_test_wiring(ResNet18((3, 32, 32), (3, 2)), 3, 32, 32)
    assert Wiring.from_dict(wiring.to_dict()) == wiring


def test_finding_the_wiring_does_not_change_the_network() -> None:
    network = AlexNet(heads=(3, 2), statistics="stored")
    network.norm1.eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    find_test_wiring(network, 3, 32, 32)
    assert network.training
    assert not network.norm1.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_masks_are_repeated_for_each_pixel_and_the_largest_of_added_masks_counts() -> None:
    masks = [torch.tensor([0.0, 1.0, 0.2]), torch.tensor([0.5, 0.0, 0.1])]
    assert mask_inputs(nn.Linear(6, 2), masks[:1]).tolist() == pytest.approx([0, 0, 1, 1, 0.2, 0.2])
    assert mask_inputs(nn.Conv2d(3, 2, 1), masks).tolist() == pytest.approx([0.5, 1, 0.2])
    assert mask_inputs(nn.Conv2d(3, 2, 1), []).tolist() == [1, 1, 1]


class Small(nn.Module):
    """Two layers with a module in between, and a head."""

    def __init__(self, between: nn.Module, width: int = 8, *, second: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.between = between
        self.second = nn.Linear(second or width, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        logits: Tensor = self.heads[head](self.second(self.between(self.first(x))).relu())
        return logits


class Twice(nn.Module):
    """Concatenation of the units with their ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.relu()], dim=1)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Small(nn.Sigmoid()), "an input of layer 'second' is not 0"),
        (Small(nn.Softmax(dim=1)), "an input of layer 'second' is not 0"),
        (Small(Twice(), second=16), "an input of layer 'second' is not 0"),
        (Small(nn.Unflatten(1, (1, 8))), r"units need \[n, units\]"),
        (Small(nn.LayerNorm(8)), "'between' is of type LayerNorm"),
        (Small(nn.PReLU()), "'between' is of type PReLU"),
        (Small(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(8))), r"BatchNorm 'between.1' does not follow a layer directly"),
        (Small(nn.ZeroPad1d((0, 1)), second=9), "layer 'second' has 9 inputs, which the 8 units of 'first' do not fit"),
    ],
    ids=["sigmoid", "softmax", "concatenation", "shape", "layer norm", "prelu", "late norm", "padding"],
)
def test_a_network_in_which_closed_units_have_an_effect_raises_an_error(network: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        find_test_wiring(network, 6)


def test_a_layer_that_reads_the_networks_own_input_beside_others_has_no_sources() -> None:
    class Skipping(Small):
        def forward(self, x: Tensor, head: int) -> Tensor:
            logits: Tensor = self.heads[head](self.second(self.first(x).relu() + x))
            return logits

    network = Skipping(nn.ReLU(), second=6)
    network.first = nn.Linear(6, 6)
    places = find_test_wiring(network, 6).places
    assert places["second"].sources == ()
    assert places["heads.0"].sources == ("second",)
