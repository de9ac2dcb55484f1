"""The settings of games are those of the protocol, and every preset can be built."""

import itertools

import pytest

from sgp.experiments.config import configure
from sgp.experiments.ppo import HEADS
from sgp.methods import METHODS
from sgp.networks import NETWORKS
from sgp.paper import PRESETS, rows, scores
from sgp.rl.games import Scale

OF_THE_PAPER = ("finetune", "ewc", "blip", "gpm", "sgp")
PUBLISHED = {
    **{"steps": 10_000_000, "envs": 16, "rollout": 125, "batch": 250, "epochs": 4, "lr": 2.5e-4, "adam_eps": 1e-5},
    **{"gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.1, "clip_values": 0.1, "entropy_weight": 0.01},
    # Half of what stands before a loss that has a half already.
    **{"value_weight": 0.25, "max_norm": 0.5, "states": 1984, "evaluate_every": 100, "evaluation_games": 10},
    "games": "kung-fu-master,boxing,jamesbond,krull,riverraid,space-invaders",
}


@pytest.mark.parametrize(("method", "preset"), list(itertools.product(OF_THE_PAPER, PRESETS)))
def test_all_methods_learn_atari_as_published(method: str, preset: str) -> None:
    flat = configure("atari", method, preset).flat()
    assert {name: flat[name] for name in PUBLISHED} == PUBLISHED
    assert flat["network"] == "actor-critic"


@pytest.mark.parametrize("method", ["gpm", "sgp"])
def test_the_memory_is_the_papers(method: str) -> None:
    for preset in PRESETS:
        flat = configure("atari", method, preset).flat()
        assert (flat["threshold"], flat["threshold_step"], flat["memory_samples"]) == (0.995, 0.0, 1984)
        assert flat.get("alpha", 25) == 25
        # Unlike for images, the published code has the basis that Eq. 1 demands.
        assert flat["first_rank"] == "minimal"


@pytest.mark.parametrize("method", OF_THE_PAPER)
def test_the_reference_preset_has_the_quirks_of_the_published_code(method: str) -> None:
    paper, flat = configure("atari", method).flat(), configure("atari", method, "reference").flat()
    assert (flat["sticky"], flat["noops"], flat["episodic_life"], flat["fire_reset"]) == (0, 30, True, True)
    assert (paper["sticky"], paper["noops"], paper["episodic_life"], paper["fire_reset"]) == (0.25, 0, False, False)
    assert flat["advantages"] == "rollout"
    projects = method in ("gpm", "sgp")
    assert flat["patches"] == ("corner" if projects else "strided")
    assert flat["adam_counter"] == ("update" if projects else "step")
    assert (paper["patches"], paper["adam_counter"], paper["optimizer"]) == ("strided", "step", "adam-gp")
    if projects:
        assert flat["bias"] == "freeze"


def test_ewc_and_blip_are_the_published_ones() -> None:
    ewc = configure("atari", "ewc", "reference").flat()
    assert (ewc["strength"], ewc["merge"], ewc["fisher"], ewc["fisher_batch"]) == (5000, "online", "batch", 62)
    assert (ewc["penalty_step"], ewc["decay"], ewc["fisher_labels"]) == ("explicit", 1.0, "true")
    blip = configure("atari", "blip").flat()
    # Ours is not divided by the square of a batch of 62 states.
    assert blip["fisher_prior"] == pytest.approx(5e-18 * 62**2, rel=0.01)
    assert (blip["max_bits"], blip["fan"], blip["fisher_labels"]) == (20, "largest", "true")


@pytest.mark.parametrize("benchmark", ["atari", "minatar"])
def test_every_method_of_the_paper_has_a_row_and_every_game_two_scores(benchmark: str) -> None:
    assert {(benchmark, method) for method in OF_THE_PAPER} <= set(rows())
    found = scores(benchmark)
    for name in configure(benchmark, "sgp").flat()["games"].split(","):
        assert Scale(**found[name]).reference > Scale(**found[name]).random


@pytest.mark.parametrize(("method", "preset"), list(itertools.product(OF_THE_PAPER, PRESETS)))
def test_every_preset_can_be_built(method: str, preset: str) -> None:
    for benchmark, network, inputs in (
        ("minatar", "minatar-actor-critic", (10, 10, 10)),
        ("atari", "small-actor-critic", (4, 84, 84)),
    ):
        config = configure(benchmark, method, preset)
        METHODS[method](NETWORKS[network].build(inputs, [3, 4]), config.method_settings, exclude=HEADS)
