"""Copies of a game are played by Stable-Baselines3."""

from typing import Any

import numpy as np
import pytest
from rl.signs import PAY, SignEnv, Signs

from sgp.registry import UnknownName
from sgp.rl.games import Scale, parse_games
from sgp.rl.settings import GameError


def play_steps(env: SignEnv, steps: int) -> list[tuple[Any, ...]]:
    """Play steps in which every copy follows its sign, except copy 0, which never does."""
    found = []
    for _ in range(steps):
        actions = env._signs.copy()
        actions[0] = (actions[0] + 1) % env.actions
        found.append(env.step(actions))
    return found


def test_a_score_is_the_sum_of_whole_rewards_over_a_whole_game_and_the_agent_sees_their_sign() -> None:
    env = SignEnv("three", Signs(length=6), copies=2)
    env.reset()
    steps = play_steps(env, 13)
    for _, rewards, _, _ in steps:
        assert rewards.tolist() == [-1.0, 1.0]
        assert rewards.dtype == np.float32
    # A lost life ends an episode of learning after every second sign, and the game is over after six.
    assert [ended.tolist() for _, _, ended, _ in steps[:6]] == [[False] * 2, [True] * 2] * 3
    infos = [info for _, _, _, info in steps]
    assert [number for number, info in enumerate(infos) if "score" in info[0]] == [5, 11]
    assert [infos[5][0]["score"], infos[5][1]["score"]] == [-6.0, 6 * PAY]
    assert env.finished == [-6.0, 6 * PAY] * 2


def test_new_games_begin_with_no_score_and_from_their_seeds() -> None:
    env = SignEnv("five", Signs(length=4), copies=3)
    env.seed(11)
    first = env.reset()
    ways = [first, *(frames for frames, *_ in play_steps(env, 3))]
    assert env._scores.any()
    env.seed(11)
    again = [env.reset(), *(frames for frames, *_ in play_steps(env, 3))]
    for one, other in zip(ways, again, strict=True):
        np.testing.assert_array_equal(one, other)
    env.reset()
    assert not env._scores.any()
    assert not np.array_equal(ways[1], play_steps(env, 1)[0][0])  # a seed is used once


def test_a_truncated_game_returns_its_last_observation() -> None:
    env = SignEnv("two", Signs(length=50, cut=3), copies=2)
    env.reset()
    play_steps(env, 2)
    before = env._frames()
    ((frames, _, ended, infos),) = play_steps(env, 1)
    assert ended.all()
    for copy in range(2):
        assert infos[copy]["TimeLimit.truncated"] is True
        np.testing.assert_array_equal(infos[copy]["terminal_observation"], before[copy])
        assert "score" in infos[copy]
    assert frames.shape == before.shape


def test_a_game_that_fails_is_named_in_the_error() -> None:
    env = SignEnv("two", Signs(), copies=1, fail_at=lambda: True)
    env.reset()
    with pytest.raises(GameError, match=r"the game two failed: MemoryError\('no more signs'\)"):
        env.step(np.zeros(1, dtype=np.int64))


def test_normalized_scores_are_0_at_random_and_1_at_the_reference_and_not_clipped() -> None:
    scale = Scale(random=10.0, reference=30.0)
    assert [scale.normalize(score) for score in (10, 30, 20, 0, 50)] == [0, 1, 0.5, -0.5, 2]


def test_an_unknown_game_is_reported_with_the_nearest_names() -> None:
    assert parse_games("krull, boxing", ["boxing", "krull"]) == ["krull", "boxing"]
    with pytest.raises(UnknownName, match=r"no game 'boxin': did you mean boxing\?"):
        parse_games("krull,boxin", ["boxing", "krull"])
