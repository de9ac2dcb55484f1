"""MinAtar's games are compared with MinAtar itself."""

import numpy as np
import pytest

pytest.importorskip("minatar", reason="of the extra 'minatar'")

from minatar import Environment

from sgp.benchmarks.settings import MinAtar
from sgp.registry import UnknownName
from sgp.rl.minatar import GAMES, MinAtarEnv, load_stream


@pytest.mark.parametrize("name", GAMES)
def test_copies_play_as_minatar_does(name: str) -> None:
    env = MinAtarEnv(name, MinAtar(), copies=2)
    plain = [Environment(name.replace("-", "_")) for _ in range(2)]
    for copy, each in enumerate(plain):
        each.seed(7 + copy)
        each.reset()
    action_ids = plain[0].minimal_action_set()
    env.seed(7)
    frames = env.reset()
    random, scores = np.random.RandomState(1), [0.0, 0.0]
    for _ in range(400):
        for copy, each in enumerate(plain):
            state = each.state()
            np.testing.assert_array_equal(frames[copy, : state.shape[2]], state.transpose(2, 0, 1))
            assert not frames[copy, state.shape[2] :].any()
        actions = random.randint(env.actions, size=2)
        frames, rewards, done, infos = env.step(actions)
        for copy, each in enumerate(plain):
            reward, over = each.act(action_ids[actions[copy]])
            scores[copy] += reward
            assert (rewards[copy], done[copy]) == (reward, over)
            if over:
                assert infos[copy]["score"] == scores[copy]
                scores[copy] = 0.0
                each.reset()
                each.last_action = 0


def test_a_game_is_truncated_after_its_maximum_length() -> None:
    env = MinAtarEnv("freeway", MinAtar(episode_steps=5), copies=3)
    env.seed(0)
    env.reset()
    for number in range(1, 11):
        _, _, done, infos = env.step(np.zeros(3, dtype=np.int64))
        assert done.tolist() == [number % 5 == 0] * 3
        assert all(("TimeLimit.truncated" in info) == (number % 5 == 0) for info in infos)
        if number % 5 == 0:
            assert infos[0]["terminal_observation"].any()


def test_the_agent_has_the_actions_that_have_an_effect() -> None:
    found = load_stream(MinAtar(games=",".join(GAMES)))
    assert found.actions == [5, 3, 3, 6, 4]
    assert found.inputs == (10, 10, 10)


def test_an_unknown_game_is_reported_with_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match=r"no game 'break-out': did you mean breakout\?"):
        load_stream(MinAtar(games="break-out"))
