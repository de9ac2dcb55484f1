"""The agent's network has the published sizes, heads per game and initialization."""

import math

import pytest
import torch
from torch import nn

from sgp.networks.actor_critic import ActorCritic


@pytest.fixture(scope="module")
def model() -> ActorCritic:
    # One network for the whole file: the orthogonal start of the big layer takes a second.
    return ActorCritic()


def test_the_trunk_has_the_published_number_of_weights(model: ActorCritic) -> None:
    trunk = {name: getattr(model.trunk, name).weight.numel() for name in ("conv1", "conv2", "conv3", "fc")}
    assert trunk == {"conv1": 8192, "conv2": 32768, "conv3": 73728, "fc": 6422528}
    assert sum(trunk.values()) == 6537216
    biases = [p.numel() for name, p in model.named_parameters() if name.endswith("bias")]
    assert biases[:4] == [32, 64, 128, 1024]


def test_each_game_has_its_own_actor_and_critic(model: ActorCritic) -> None:
    frames = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    for game, actions in enumerate((14, 18, 18, 18, 18, 6)):
        logits, values = model.logits_and_values(frames, game)
        torch.testing.assert_close(model(frames, game), logits)
        assert logits.shape == (3, actions)
        assert values.shape == (3,)


def test_pixels_of_any_dtype_are_divided_by_255(model: ActorCritic) -> None:
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(model.trunk(frames), model.trunk(frames.float()))
    seen: list[float] = []
    hook = model.trunk.conv1.register_forward_pre_hook(lambda module, inputs: seen.append(float(inputs[0].max())))
    model(torch.full((1, 4, 84, 84), 255.0), game=0)
    hook.remove()
    assert seen == [1.0]


def test_weights_start_orthogonal_with_the_published_gains(model: ActorCritic) -> None:
    for layer, gain in (
        (model.trunk.conv1, math.sqrt(2)),
        (model.trunk.conv2, math.sqrt(2)),
        (model.trunk.conv3, math.sqrt(2)),
        (model.trunk.fc, math.sqrt(2)),
        (model.critics[0], 1.0),
        (model.actors[0], 0.01),
    ):
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        assert layer.bias is not None
        assert not layer.bias.any()
        rows = layer.weight.detach().flatten(1).double()
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)).double(), atol=1e-4 * gain**2, rtol=0)
