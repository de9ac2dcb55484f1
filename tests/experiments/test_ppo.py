"""Games in a row: what is kept, what is written down, and runs that repeat themselves to the bit."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.small import events, of_kind, same_weights, trace
from rl import signs
from rl.signs import PAY, Signs
from rl.small import METHODS, run, run_with_stops, signs_stream, small
from torch import Tensor

from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.ppo import PPOTrainer, build_agent
from sgp.experiments.summary import read_summary
from sgp.methods.gpm import GPM
from sgp.networks.actor_critic import ActorCritic
from sgp.rl.settings import GameError

pytestmark = pytest.mark.usefixtures("signs")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_equals_one_that_was_not(method: str, tmp_path: Path) -> None:
    config = small(method)
    whole = run(tmp_path / "whole", config)
    # In the first stretch, after a checkpoint inside a game, and at the end of the last game.
    stopped = run_with_stops(tmp_path / "stopped", config, (0, 1), (0, 3), (1, 3))
    assert same_weights(whole.network, stopped.network)
    assert trace(tmp_path / "whole") == trace(tmp_path / "stopped")


@pytest.mark.parametrize("settings", [{"adam_counter": "update"}, {"advantages": "rollout", "channels_last": True}])
def test_so_it_does_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    config = small("sgp", steps=160, evaluate_every=1, **settings)
    run(tmp_path / "whole", config)
    run_with_stops(tmp_path / "stopped", config, (0, 2), (1, 4))
    assert trace(tmp_path / "whole") == trace(tmp_path / "stopped")


def test_another_seed_is_another_run_and_a_watcher_changes_nothing(tmp_path: Path) -> None:
    seen = []
    run(tmp_path / "one", small(), lambda event, values: seen.append(event))
    run(tmp_path / "two", small())
    run(tmp_path / "other", small(seed=1))
    assert trace(tmp_path / "one") == trace(tmp_path / "two")
    assert trace(tmp_path / "one") != trace(tmp_path / "other")
    assert seen == [entry["event"] for entry in events(tmp_path / "one")]


def test_the_random_state_outside_stays_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    run(tmp_path / "run", small(steps=32))
    ours = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(ours[0], torch.rand(3))
    assert np.array_equal(ours[1], np.random.rand(3))


def test_evaluations_are_at_the_start_of_a_game_at_each_interval_and_at_its_end(tmp_path: Path) -> None:
    run(tmp_path / "run", small(steps=160, evaluate_every=2, games="two,three,five"))
    found = [entry for entry in events(tmp_path / "run") if entry["event"] in ("evaluation", "game")]
    assert [(entry["task"], entry["update"]) for entry in found] == [
        (task, update) for task in range(3) for update in (0, 2, 4, 5)
    ]
    assert [entry["step"] for entry in found] == [
        32 * (5 * task + update) for task in range(3) for update in (0, 2, 4, 5)
    ]
    assert [len(entry["scores"]) for entry in found] == [1] * 4 + [2] * 4 + [3] * 4
    assert [entry["event"] for entry in found] == ["evaluation", "evaluation", "evaluation", "game"] * 3


def test_updates_are_written_down_with_the_scores_of_the_games_that_ended(tmp_path: Path) -> None:
    run(tmp_path / "run", small())
    found = of_kind(events(tmp_path / "run"), "update")
    assert [(entry["task"], entry["update"], entry["step"]) for entry in found] == [
        *[(0, 1, 32), (0, 2, 64), (0, 3, 96)],
        *[(1, 1, 128), (1, 2, 160), (1, 3, 192)],
    ]
    assert [entry["lr"] for entry in found[:3]] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])
    for entry in found:
        # Four copies of eight steps: each plays a game of six signs and begins another, or continues it.
        assert entry["games"] in (4, 8)
        assert -6 <= entry["score"] <= 6 * PAY
        assert entry["entropy"] > 0
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[1:2]]
    assert seconds[0].keys() >= {"play", "learn"}


def test_rewards_are_normalised_and_added_up_over_the_games_so_far(tmp_path: Path) -> None:
    run(tmp_path / "run", small())
    for entry in events(tmp_path / "run"):
        if entry["event"] in ("evaluation", "game"):
            assert entry["normalised"] == pytest.approx([score / (6 * PAY) for score in entry["scores"]])
            assert entry["accumulated"] == pytest.approx(sum(entry["normalised"]))
    run(tmp_path / "unknown", small(games="two,five"))
    last = of_kind(events(tmp_path / "unknown"), "game")[-1]
    assert last["normalised"][1] is None
    assert last["accumulated"] is None
    (line,) = (tmp_path / "unknown/accumulated.csv").read_text().splitlines()[-1:]
    assert line.endswith(",five,")


def test_a_folder_tells_what_the_run_came_to(tmp_path: Path) -> None:
    run(tmp_path / "run", small())
    summary = read_summary(RunFolder(tmp_path / "run"))
    assert summary.names == ["two", "three"]
    assert summary.finished
    assert [len(each["scores"]) for each in summary.tasks] == [1, 2]
    assert summary.last["bytes"].keys() >= {"network", "bases", "importances"}
    assert summary.last["free"].keys() == {"trunk.conv1", "trunk.fc"}
    header, *rows = (tmp_path / "run/scores.csv").read_text().splitlines()
    assert header == "step,learning,game,score,normalised"
    assert [row.split(",")[:3] for row in rows[3:5]] == [["96", "three", "two"], ["96", "three", "three"]]


def leak(path: Path, **settings: Any) -> float:
    """Return the largest share, over layers, of the second game's change that lies in the space of the first game."""
    kept: dict[str, Tensor] = {}

    def keep(event: str, values: dict[str, Any]) -> None:
        if event == "game" and values["task"] == 0:
            assert isinstance(learner.method, GPM)
            kept.update({name: space.basis[0].clone() for name, space in learner.method.memory.subspaces.items()})
            kept.update({f"{name} before": matrix(learner.network, name) for name in list(kept)})

    config = small("gpm", steps=320, evaluate_every=10, **settings)
    with RunFolder.begin(path, config, resume=False) as folder:
        learner = PPOTrainer(config, signs_stream(), folder, keep)
        learner.run()
    shares = []
    for name in ("trunk.conv1", "trunk.fc"):
        change = matrix(learner.network, name) - kept[f"{name} before"]
        assert float(change.norm()) > 1e-3
        shares.append(float((change @ kept[name]).norm() / change.norm()))
    return max(shares)


def matrix(network: ActorCritic, name: str) -> Tensor:
    layer: Any = network.get_submodule(name)
    return torch.cat([layer.weight.detach().flatten(1), layer.bias.detach().unsqueeze(1)], dim=1)


def test_adam_gp_keeps_out_of_the_space_of_the_first_game_and_adam_on_projected_gradients_does_not(
    tmp_path: Path,
) -> None:
    assert leak(tmp_path / "gp") < 1e-4
    assert leak(tmp_path / "projected", optimizer="adam-on-projected") > 0.1


def test_adam_on_projected_needs_a_method_that_projects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adam-on-projected: ewc projects no steps"):
        PPOTrainer(small("ewc", optimizer="adam-on-projected"), signs_stream(), RunFolder(tmp_path))


def test_adam_on_projected_has_no_steps_between_projections(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"projects every gradient: set project_every to 1"):
        PPOTrainer(small("sgp", optimizer="adam-on-projected", project_every=4), signs_stream(), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("method", "settings", "sizes"),
    [("ewc", {"fisher_batch": 20}, [20, 10]), ("blip", {"fisher_batch": 20}, [20, 10]), ("gpm", {}, [16, 14])],
)
def test_as_many_states_as_a_method_asks_for_run_at_once_and_not_more_where_it_does_not_matter(
    method: str, settings: dict[str, Any], sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("sgp.experiments.ppo.STATES_AT_ONCE", 16)
    learner = PPOTrainer(small(method, **settings), signs_stream(), RunFolder(tmp_path))
    monkeypatch.setattr(learner.method, "consolidate", lambda batches, _: taken.extend(len(b[1]) for b in batches))
    learner.consolidate(0, torch.zeros(32, 10, 10, 10))
    assert taken == sizes


def test_a_method_takes_in_states_of_the_last_update_with_actions_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[Tensor, Tensor]] = []
    likelihoods: list[Tensor] = []

    def consolidate(self: Any, batches: Any, log_likelihood: Any) -> None:
        taken.extend(batches)
        likelihoods.extend(log_likelihood(batch) for batch in batches)
        logits = [self.network(states, 0).log_softmax(1) for states, _ in batches]
        expected = [part.gather(1, a.unsqueeze(1)).squeeze(1) for part, (_, a) in zip(logits, batches, strict=True)]
        torch.testing.assert_close(likelihoods, expected)

    monkeypatch.setattr("sgp.methods.ewc.EWC.consolidate", consolidate)
    learner = run(tmp_path / "run", small("ewc", games="three", fisher_batch=8))
    assert [len(actions) for _, actions in taken] == [8, 8, 8, 6]  # 30 of the 32 states
    states, actions = (torch.cat(part) for part in zip(*taken, strict=True))
    assert states.dtype == torch.uint8
    # Nothing is learned of actions that a uniform policy would not draw as well: all of them are there.
    assert set(actions.tolist()) <= {0, 1, 2}
    assert len(set(actions.tolist())) > 1
    assert likelihoods[0].shape == (8,)
    assert likelihoods[0].requires_grad
    assert learner.config.trainer.states == 30


def test_a_loss_that_is_no_number_ends_the_run_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"became NaN or infinite in update 1 of two; try a lower --lr than 1e\+30"):
        run(tmp_path / "run", small(lr=1e30))


@pytest.mark.parametrize("update", [2, 3], ids=["before a checkpoint", "at the end of a game"])
def test_weights_that_are_no_numbers_are_told_at_once_and_never_kept(update: int, tmp_path: Path) -> None:
    def spoil(event: str, values: dict[str, Any]) -> None:
        if event == "update" and values["update"] == update:
            learner.network.trunk.fc.weight.data.fill_(math.nan)

    with RunFolder.begin(tmp_path, small(), resume=False) as folder:
        learner = PPOTrainer(small(), signs_stream(), folder, spoil)
        with pytest.raises(RunError, match=f"became NaN or infinite in update {update} of two; try a lower --lr"):
            learner.run()
        kept = folder.load()
    assert kept is not None
    assert all(value.isfinite().all() for value in kept[1]["network"].values())


def test_a_game_that_fails_loses_nothing_that_was_learned_before(tmp_path: Path) -> None:
    config, calls = small(), iter(range(10**6))
    failing = signs.stream(Signs(), fail_at=lambda: next(calls) > 60)
    with pytest.raises(GameError, match=r"the game (two|three) failed"):
        run(tmp_path / "run", config, stream=failing)
    run(tmp_path / "run", config, resume=True)
    run(tmp_path / "whole", config)
    assert trace(tmp_path / "run") == trace(tmp_path / "whole")


def test_a_network_without_critics_is_refused() -> None:
    with pytest.raises(ValueError, match="network mlp has no critics"):
        build_agent(small(network="mlp"), signs_stream())
    with pytest.raises(ValueError, match=r"actor-critic takes inputs of shape \(4, 84, 84\)"):
        build_agent(small(network="actor-critic"), signs_stream())


def test_what_pays_is_learned(tmp_path: Path) -> None:
    config = small("finetune", games="two", steps=30 * 32, evaluate_every=30, evaluation_games=10, epochs=4)
    run(tmp_path / "run", config)
    first, last = (entry["normalised"][0] for entry in events(tmp_path / "run") if "normalised" in entry)
    assert last > 0.9 > first
    assert math.isfinite(first)
