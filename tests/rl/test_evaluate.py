"""Evaluations play greedily, count the right games, and are deterministic."""

import numpy as np
import pytest
import torch
from rl.signs import PAY, SignEnv, Signs

from sgp.networks.actor_critic import MINATAR, ActorCritic
from sgp.rl.evaluate import play_games


class Uneven(SignEnv):
    """Copy 0 plays short games, the others long ones."""

    def play_step(self, actions):  # type: ignore[no-untyped-def]
        played = super().play_step(actions)
        self._steps[1:] = np.where(played.over[1:], -10, self._steps[1:])
        return played


@pytest.fixture(scope="module")
def network() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic([2, 3], MINATAR)


@pytest.mark.parametrize("games", [1, 4, 10])
def test_as_many_games_are_played_as_asked_for(network: ActorCritic, games: int) -> None:
    env = SignEnv("three", Signs(length=3), copies=games)
    assert len(play_games(network, 1, env, games=games, each=False, seed=3)) == games
    assert len(play_games(network, 1, env, games=games, each=True, seed=3)) == games


def test_the_most_probable_action_is_taken(network: ActorCritic) -> None:
    with torch.no_grad():
        network.actors[1].bias.copy_(torch.tensor([0.0, 5.0, 4.9]))
    env = SignEnv("three", Signs(length=1), copies=50)
    env.seed(1)
    env.reset()
    expected = np.where(env._signs == 1, PAY, -1.0)
    assert sorted(play_games(network, 1, env, games=50, each=True, seed=1)) == sorted(expected)


def test_the_same_policy_plays_the_same_games(network: ActorCritic) -> None:
    env = SignEnv("two", Signs(), copies=5)
    first = play_games(network, 0, env, games=5, each=False, seed=8)
    play_games(network, 0, env, games=5, each=False, seed=9)
    assert play_games(network, 0, env, games=5, each=False, seed=8) == first


def test_short_games_count_more_often_unless_each_copy_counts_once(network: ActorCritic) -> None:
    # Copy 0 ends every 2 steps, the others after 2 and then every 12.
    env = Uneven("two", Signs(length=2), copies=3)
    frames: list[int] = []
    step = env.step
    env.step = lambda actions: frames.append(1) or step(actions)  # type: ignore[method-assign, func-returns-value]
    assert len(play_games(network, 0, env, games=3, each=True, seed=0)) == 3
    assert len(frames) == 2
    frames.clear()
    assert len(play_games(network, 0, env, games=5, each=False, seed=0)) == 5
    assert len(frames) == 6  # three at once, then two of copy 0
