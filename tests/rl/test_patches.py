"""Corner patches are as many as the convolution has outputs, in steps of one from the upper left corner."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import sgp
from sgp.methods.fisher import compute_sample_fisher
from sgp.networks.actor_critic import ActorCritic
from sgp.projection.layer_types import get_layer_type
from sgp.rl.patches import CornerConv2d, use_corner_patches


def test_only_strided_convolutions_are_converted_and_outputs_stay_the_same() -> None:
    torch.manual_seed(0)
    network = ActorCritic([3])
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    before, names = network(frames, 0), list(network.state_dict())
    use_corner_patches(network)
    kinds = {name: type(module) for name, module in network.trunk.named_children()}
    assert kinds == {"conv1": CornerConv2d, "conv2": CornerConv2d, "conv3": nn.Conv2d, "fc": nn.Linear}
    assert torch.equal(network(frames, 0), before)
    assert list(network.state_dict()) == names


def test_the_rows_are_the_published_ones() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, kernel_size=8, stride=4)
    layer.__class__ = CornerConv2d
    frames = torch.randn(2, 4, 84, 84)
    expected = [
        frame[:, row : row + 8, column : column + 8].flatten()
        for frame in frames
        for row in range(20)
        for column in range(20)
    ]
    (rows,) = get_layer_type(layer).unfold_rows(layer, frames)
    assert torch.equal(rows, torch.stack(expected))


def test_pixels_outside_the_corner_do_not_change_a_memory() -> None:
    torch.manual_seed(0)
    images = torch.randn(6, 1, 12, 12)
    elsewhere = images.clone()
    elsewhere[:, :, 8:] = torch.randn(6, 1, 4, 12)  # 5 x 5 patches of 4 pixels reach row 7
    elsewhere[:, :, :, 8:] = torch.randn(6, 1, 12, 4)

    def bases(inputs: torch.Tensor, *, corner: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(1, 3, kernel_size=4, stride=2), nn.Flatten(), nn.Linear(75, 2))
        if corner:
            use_corner_patches(model)
        memory = sgp.GradientMemory(model, threshold=0.8, alpha=math.inf, exclude=["2"])
        memory.update([inputs])
        return memory.subspaces["0"].basis

    assert torch.equal(bases(images, corner=True), bases(elsewhere, corner=True))
    assert not torch.allclose(bases(images, corner=False)[..., :1], bases(elsewhere, corner=False)[..., :1])


def test_the_fisher_information_ignores_corner_patches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, kernel_size=4, stride=2), nn.Flatten(), nn.Linear(75, 2))
    batches = [(torch.randn(5, 1, 12, 12), torch.tensor([0, 1, 0, 1, 1]))]

    def fisher() -> dict[str, torch.Tensor]:
        return compute_sample_fisher(
            model,
            dict(model.named_parameters()),
            batches,
            lambda batch: -F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        )

    expected = fisher()
    use_corner_patches(model)
    for name, value in fisher().items():
        torch.testing.assert_close(value, expected[name])
