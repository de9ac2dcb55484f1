"""A few hundred steps of real Atari games."""

from pathlib import Path

import numpy as np
import pytest

from sgp.benchmarks.settings import Atari
from sgp.registry import UnknownName
from sgp.rl.atari import AtariEnv, load_stream
from sgp.rl.settings import GameError

pytestmark = pytest.mark.slow


def test_the_papers_games_have_their_numbers_of_actions() -> None:
    found = load_stream(Atari())
    assert found.names == ["kung-fu-master", "boxing", "jamesbond", "krull", "riverraid", "space-invaders"]
    assert found.actions == [14, 18, 18, 18, 18, 6]
    assert found.inputs == (4, 84, 84)
    assert all(game.scale is not None for game in found.games)


def test_a_lost_life_ends_an_episode_but_not_the_game() -> None:
    env = AtariEnv("space-invaders", Atari(episodic_life=True, sticky=0), copies=2, threads=1)
    env.seed(1)
    frames = env.reset()
    assert frames.shape == (2, 4, 84, 84)
    assert frames.dtype == np.uint8
    random, ended, total, clipped = np.random.RandomState(0), 0, 0.0, set()
    while not env.finished:
        before = env._scores.copy()
        _, rewards, done, infos = env.step(random.randint(6, size=2))
        clipped |= set(rewards.tolist())
        ended += int(done[0])
        if "score" in infos[0]:
            total = infos[0]["score"]
        else:
            assert env._scores[0] >= before[0]
    if total:
        assert ended == 3  # lives
    assert clipped <= {0.0, 1.0}
    assert max(env.finished) > 10  # the game's own points, five for a shot in the lowest row


def test_without_episodic_life_only_the_game_ends_an_episode_and_seeds_repeat_it() -> None:
    def play() -> tuple[list[int], list[float], int]:
        env = AtariEnv("space-invaders", Atari(episode_steps=150, sticky=0.25), copies=2, threads=2)
        env.seed(5)
        frames, random = env.reset(), np.random.RandomState(3)
        sums, cut = [int(frames.sum())], 0
        for _ in range(320):
            before = frames
            frames, _, done, infos = env.step(random.randint(6, size=2))
            sums.append(int(frames.sum()))
            for copy in np.flatnonzero(done):
                assert "score" in infos[copy]
                cut += "TimeLimit.truncated" in infos[copy]
                if "TimeLimit.truncated" in infos[copy]:
                    # What the game showed last, not the first of the next one.
                    assert np.array_equal(infos[copy]["terminal_observation"][:3], before[copy][1:])
                    assert not frames[copy][:3].any()
        return sums, env.finished, cut

    first, second = play(), play()
    assert first == second
    assert first[2] == 4  # two copies, twice in 320 steps


def test_a_game_that_is_over_at_its_time_limit_is_not_truncated() -> None:
    env = AtariEnv("boxing", Atari(episodic_life=True, noops=30), copies=4, threads=1)

    class FakeEnv:
        """Four copies: a life lost, a game over, one truncated, and one over at its time limit.

        The last two start with more idle steps than the previous game lasted.
        """

        def reset(self, seed: None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
            return np.zeros((4, 4, 84, 84), np.uint8), {"episode_frame_number": np.array([90, 90, 5, 5])}

        def step(self, actions: np.ndarray) -> tuple[object, ...]:
            ended, cut = np.array([True, True, False, True]), np.array([False, False, True, True])
            frames = np.zeros((4, 4, 84, 84), np.uint8)
            infos = {"episode_frame_number": np.array([94, 7, 29, 29]), "final_obs": frames}
            return frames, np.ones(4), ended, cut, infos

    env._env = FakeEnv()  # type: ignore[assignment]
    env.reset()
    _, _, ended, infos = env.step(np.zeros(4, dtype=np.int64))
    assert ended.all()
    assert ["score" in info for info in infos] == [False, True, True, True]
    assert ["TimeLimit.truncated" in info for info in infos] == [False, False, True, False]


def test_an_unknown_game_is_reported_with_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match=r"no game 'space-invader': did you mean space-invaders"):
        load_stream(Atari(games="boxing,space-invader"))


def test_a_game_whose_file_is_missing_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(GameError, match=r"the game boxing cannot be started \(.*boxing\.bin.*is its file in ale-py"):
        load_stream(Atari(games="boxing"))
