"""Stable-Baselines3's PPO trains the shared trunk and a game's own heads of our network."""

import numpy as np
import pytest
import torch
from rl.signs import SignEnv, Signs
from rl.small import small

from sgp.networks.actor_critic import MINATAR, ActorCritic
from sgp.rl.adam import AdamByUpdate
from sgp.rl.agent import Agent
from sgp.rl.games import StepResult


def agent_of(network: ActorCritic, game: int, name: str, copies: int = 4, **settings: object) -> Agent:
    env = SignEnv(name, Signs(), copies)
    return Agent(network, game, env, small(**settings).trainer, lambda agent: None)


@pytest.fixture
def network() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic([2, 3], MINATAR)


def test_games_share_one_trunk_and_have_separate_heads(network: ActorCritic) -> None:
    first, second = agent_of(network, 0, "two").policy, agent_of(network, 1, "three").policy
    assert first.features_extractor.trunk is second.features_extractor.trunk is network.trunk
    for policy, game in ((first, 0), (second, 1)):
        assert policy.action_net is network.actors[game]
        assert policy.value_net is network.critics[game]
        optimized = {id(p) for group in policy.optimizer.param_groups for p in group["params"]}
        own = [network.trunk, network.actors[game], network.critics[game]]
        assert optimized == {id(p) for part in own for p in part.parameters()}


def test_building_an_agent_changes_no_weights_and_its_outputs_are_the_networks(network: ActorCritic) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    policy = agent_of(network, 1, "three").policy
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    states = (torch.rand(5, 10, 10, 10) < 0.2).to(torch.uint8)
    logits, values = network.logits_and_values(states, 1)
    actions = torch.tensor([0, 1, 2, 0, 1])
    found, likelihood, _ = policy.evaluate_actions(states, actions)
    torch.testing.assert_close(found.squeeze(1), values)
    torch.testing.assert_close(likelihood, logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1))


def test_only_the_trunk_and_the_games_own_heads_are_trained(network: ActorCritic) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(0)
    agent_of(network, 0, "two").run_updates(0, 1)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(("trunk", "actors.0", "critics.0"))}


def test_the_learning_rate_decays_linearly_to_0_after_the_last_update(network: ActorCritic) -> None:
    rates = []
    agent = agent_of(network, 0, "two", steps=160, lr=0.5)
    agent.updated = lambda agent: rates.append((agent.policy.optimizer.param_groups[0]["lr"], agent.lr))
    agent.run_updates(0, 2)
    agent.run_updates(2, 3)
    assert rates == [(pytest.approx(rate), pytest.approx(rate)) for rate in (0.5, 0.4, 0.3, 0.2, 0.1)]


def test_new_episodes_start_with_each_call(network: ActorCritic) -> None:
    agent = agent_of(network, 0, "two")
    begun = []
    begin = agent.env.start_games
    agent.env.start_games = lambda seeds: begun.append(1) or begin(seeds)
    agent.run_updates(0, 2)
    agent.run_updates(2, 1)
    assert len(begun) == 2
    assert agent.rollout_buffer.episode_starts[0].all()


def test_returns_end_with_an_episode_and_are_bootstrapped_only_where_it_was_truncated(
    network: ActorCritic,
) -> None:
    # A life is lost after steps 2 and 4 of a game, and it is truncated after step 5.
    training = small(gamma=0.9, gae_lambda=0.8).trainer
    agent = Agent(network, 0, SignEnv("two", Signs(length=50, cut=5), 4), training, lambda agent: None)
    steps: list[StepResult] = []
    play = agent.env.play_step
    agent.env.play_step = lambda actions: steps.append(play(actions)) or steps[-1]
    agent.train = lambda: None  # type: ignore[method-assign]
    torch.manual_seed(0)
    agent.run_updates(0, 1)
    found = agent.rollout_buffer

    def value(frames: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network.logits_and_values(torch.from_numpy(frames), 0)[1].numpy()

    values, after = found.values, value(steps[-1].frames)
    advantages, later = np.zeros((8, 4)), np.zeros(4)
    for number in reversed(range(8)):
        played = steps[number]
        assert played.ended.tolist() == [number % 5 in (1, 3, 4)] * 4
        follows = after if number == 7 else values[number + 1]
        follows = np.where(played.ended, 0.0, follows)
        if played.truncated.any():
            assert played.last is not None
            assert number == 4
            follows = value(played.last)
        later = np.sign(played.rewards) + 0.9 * follows - values[number] + 0.9 * 0.8 * ~played.ended * later
        advantages[number] = later
    np.testing.assert_allclose(found.advantages, advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.returns, advantages + values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["batch", "rollout"])
def test_advantages_are_standardized_over_the_states_of_the_setting(network: ActorCritic, where: str) -> None:
    agent = agent_of(network, 0, "two", advantages=where)
    agent.run_updates(0, 1)
    found = agent.rollout_buffer.advantages
    standard = abs(found.mean()) < 1e-5 and abs(found.std(ddof=1) - 1) < 1e-3
    assert standard == (where == "rollout")
    assert agent.normalize_advantage == (where == "batch")


def test_adam_counts_updates_if_the_setting_says_so(network: ActorCritic) -> None:
    agent = agent_of(network, 0, "two", adam_counter="update")
    assert isinstance(agent.policy.optimizer, AdamByUpdate)
    agent.run_updates(0, 2)
    assert {float(state["step"]) for state in agent.policy.optimizer.state.values()} == {2.0}
    counted = agent_of(network, 0, "two")
    counted.run_updates(0, 2)
    assert {float(state["step"]) for state in counted.policy.optimizer.state.values()} == {4.0}


def test_the_settings_reach_ppo(network: ActorCritic) -> None:
    settings = {"gamma": 0.5, "gae_lambda": 0.6, "value_weight": 0.7, "entropy_weight": 0.8, "max_norm": 0.9}
    agent = agent_of(network, 0, "two", **settings, clip_range=0.3, clip_values=0.4, adam_eps=1e-3)
    assert (agent.gamma, agent.gae_lambda, agent.vf_coef, agent.ent_coef, agent.max_grad_norm) == (
        *(0.5, 0.6, 0.7),
        *(0.8, 0.9),
    )
    assert (agent.clip_range(1.0), agent.clip_range_vf(1.0), agent.n_epochs, agent.batch_size) == (0.3, 0.4, 1, 16)
    assert agent.policy.optimizer.param_groups[0]["eps"] == 1e-3
    assert agent_of(network, 0, "two", clip_values=None).clip_range_vf is None


def test_the_states_of_the_last_update_are_those_that_were_seen(network: ActorCritic) -> None:
    agent = agent_of(network, 0, "two")
    seen: list[np.ndarray] = []
    play = agent.env.play_step

    def watched(actions: np.ndarray) -> object:
        played = play(actions)
        seen.append(played.frames)
        return played

    agent.env.play_step = watched
    agent.run_updates(0, 1)
    states = agent.get_states()
    assert states.shape == (32, 10, 10, 10)
    assert states.dtype == torch.uint8
    ours = {tuple(state.flatten().tolist()) for state in states}
    assert {tuple(frame.flatten().tolist()) for frames in seen[:-1] for frame in frames} <= ours
