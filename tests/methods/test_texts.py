"""Texts run through the network in batches of similar length in an update of the memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sgp.methods.gpm import TEXTS_PER_BATCH
from sgp.methods.sgp import SGP, SGPSettings


class Texts(nn.Module):
    """Embeddings of texts padded with 0, and a head on the mean of a layer's outputs for them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6)
        self.hidden = nn.Linear(6, 8)
        self.heads = nn.Linear(8, 2)
        self.lengths: list[int] = []

    def token_mask(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        return mask[:, : int(mask.sum(1).max())]

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.token_mask(tokens)
        self.lengths.append(mask.shape[1])
        hidden = torch.relu(self.hidden(self.words(tokens[:, : mask.shape[1]])))
        out: Tensor = self.heads((hidden * mask.unsqueeze(-1)).sum(1))
        return out


def update_memory(monkeypatch: pytest.MonkeyPatch, *, in_batches: bool, samples: int | dict[str, int]) -> SGP:
    torch.manual_seed(0)
    network = Texts()
    settings = SGPSettings(threshold=0.9, alpha=1.0, memory_samples=samples)
    method = SGP(network, settings, exclude=["heads"])
    if not in_batches:
        monkeypatch.setattr(method, "_split_texts", lambda batches: batches)
    lengths = torch.randint(1, 20, (200,))
    tokens = torch.randint(1, 50, (200, 20)) * (torch.arange(20) < lengths.unsqueeze(1))
    labels = torch.zeros(200, dtype=torch.int64)
    network.lengths.clear()
    method.consolidate([(tokens, labels)], lambda batch: network(batch[0]))
    return method


def get_state(method: SGP) -> dict[str, Any]:
    return {name: space.state_dict() for name, space in method.memory.subspaces.items()}


def test_a_memory_is_the_same_with_less_padding_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = (update_memory(monkeypatch, in_batches=in_batches, samples=150) for in_batches in (False, True))
    seen = {each: each.network.lengths for each in (whole, split)}
    assert seen[whole] == [19]
    assert len(seen[split]) == -(-150 // TEXTS_PER_BATCH)
    assert seen[split] == sorted(seen[split])
    assert seen[split][0] < 10
    for name, space in whole.memory.subspaces.items():
        other = split.memory.subspaces[name]
        assert torch.equal(other.rank, space.rank)
        torch.testing.assert_close(other.importance, space.importance, rtol=1e-4, atol=1e-5)


def test_layers_with_fewer_texts_do_not_get_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"words": 150, "*": 20}
    whole, split = (update_memory(monkeypatch, in_batches=in_batches, samples=samples) for in_batches in (False, True))
    for name, state in get_state(whole).items():
        for part, tensor in state.items():
            assert torch.equal(tensor, get_state(split)[name][part])
