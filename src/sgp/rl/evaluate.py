"""Scores of an agent that plays greedily."""

from __future__ import annotations

import torch

from sgp.networks.actor_critic import ActorCritic
from sgp.rl.games import GameEnv


@torch.no_grad()
def play(network: ActorCritic, game: int, env: GameEnv, *, games: int, each: bool, seed: int) -> list[float]:
    """Scores of some whole games, in which the most probable action is always taken.

    Args:
        network: plays.
        game: which of its actors.
        env: copies of the game, as many as games are asked for.
        games: how many.
        each: count the first game of each copy, not the games that end first.
        seed: of the copies, whose games are the same for the same policy.
    """
    env.seed(seed)
    observations = env.reset()
    scores: list[float] = []
    finished: set[int] = set()
    device = next(network.parameters()).device
    while len(scores) < games:
        actions = network(torch.from_numpy(observations).to(device), game).argmax(dim=1)
        observations, _, _, told = env.step(actions.cpu().numpy())
        for copy, words in enumerate(told):
            if "score" in words and not (each and copy in finished):
                finished.add(copy)
                scores.append(words["score"])
    return scores[:games]
