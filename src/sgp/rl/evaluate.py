"""Evaluation of an agent that plays greedily."""

from __future__ import annotations

import torch

from sgp.networks.actor_critic import ActorCritic
from sgp.rl.games import GameEnv


@torch.no_grad()
def play_games(network: ActorCritic, game: int, env: GameEnv, *, games: int, each: bool, seed: int) -> list[float]:
    """Play whole games with the most probable action at each step, and return their scores.

    Args:
        network: Agent that plays.
        game: Index of the game's actor.
        env: Copies of the game, as many as `games`.
        games: Number of games.
        each: Whether to count the first game of each copy instead of the games that end first.
        seed: Seed of the copies; the same policy plays the same games.
    """
    env.seed(seed)
    observations = env.reset()
    scores: list[float] = []
    finished: set[int] = set()
    device = next(network.parameters()).device
    while len(scores) < games:
        actions = network(torch.from_numpy(observations).to(device), game).argmax(dim=1)
        observations, _, _, infos = env.step(actions.cpu().numpy())
        for copy, info in enumerate(infos):
            if "score" in info and not (each and copy in finished):
                finished.add(copy)
                scores.append(info["score"])
    return scores[:games]
