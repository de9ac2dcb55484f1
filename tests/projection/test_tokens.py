"""Embeddings: bases are tokens, and everything else is as for a linear layer on one-hot rows."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from sgp.projection.gram import InputGram
from sgp.projection.subspace import Subspace
from sgp.projection.tokens import TokenCounts, TokenSubspace

WORDS = 9


def counted(indices: Tensor) -> TokenCounts:
    counts = TokenCounts(WORDS)
    counts.add(indices)
    return counts


def one_hot(indices: Tensor) -> InputGram:
    gram = InputGram(1, WORDS, precise=True)
    gram.add(F.one_hot(indices, WORDS).double().unsqueeze(0))
    return gram


# How often each token comes in two tasks: all different, so that no order is left open.
tasks = st.lists(st.permutations(range(WORDS)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(tasks, st.sampled_from([0.3, 0.7, 0.9, 1.0]), st.sampled_from([0.0, 1.0, 10.0, math.inf]))
def test_bases_and_importances_are_those_of_a_dense_subspace_on_one_hot_rows(
    counts: list[list[int]], threshold: float, alpha: float
) -> None:
    tokens, dense = TokenSubspace.empty(WORDS), Subspace.empty(1, WORDS)
    for task in counts:
        indices = torch.repeat_interleave(torch.arange(WORDS), torch.tensor(task))
        tokens = tokens.grow(counted(indices), threshold=threshold, alpha=alpha)
        dense = dense.grow(one_hot(indices), threshold=threshold, alpha=alpha)
    assert int(tokens.rank) == int(dense.rank)
    diagonal = torch.zeros(WORDS).index_put((tokens.tokens,), tokens.importance[0])
    projector = (dense.basis * dense.importance.unsqueeze(1)) @ dense.basis.mT
    # Residuals of counts that are all taken are rounding in the dense form, hence the tolerance.
    torch.testing.assert_close(torch.diag(diagonal), projector[0], atol=1e-5, rtol=0)
    assert (tokens.blocked, tokens.dimension, tokens.groups) == (dense.blocked, dense.dimension, dense.groups)
    assert tokens.free == pytest.approx(dense.free, abs=1e-6)
    change = torch.randn(1, 4, WORDS)
    mine, theirs = change.clone(), change.clone()
    tokens.subtract_projection_(mine, None, mine, None)
    dense.subtract_projection_(theirs, None, theirs, None)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    gram = counted(torch.tensor([0, 0, 3, 8]))
    torch.testing.assert_close(
        tokens.compute_captured_energy(gram), dense.compute_captured_energy(one_hot(torch.tensor([0, 0, 3, 8])))
    )


def test_the_importance_of_a_token_goes_with_the_root_of_its_count() -> None:
    space = TokenSubspace.empty(WORDS).grow(counted(torch.tensor([2] * 16 + [5] * 4 + [7])), threshold=1.0, alpha=1.0)
    assert space.tokens.tolist() == [2, 5, 7]
    assert space.importance[0].tolist() == pytest.approx([1.0, 2 * 2 / (2 + 4), 2 * 1 / (1 + 4)])


def test_tokens_as_frequent_as_each_other_are_taken_in_their_own_order() -> None:
    space = TokenSubspace.empty(WORDS).grow(counted(torch.tensor([8, 3, 5, 1])), threshold=0.5, alpha=1.0)
    assert space.tokens.tolist() == [1, 3]


class Words(nn.Module):
    """An embedding, and a linear layer on the mean of its vectors."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6, **options)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens).mean(1))


OLD, NEW = torch.tensor([[0, 1, 2], [2, 3, 3]]), torch.tensor([[3, 4, 5], [6, 7, 0]])


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(10):
        optimizer.zero_grad()
        model(NEW).square().sum().add(model(NEW).sum()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"sparse": True}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"scale_grad_by_freq": True}),
        (lambda p: torch.optim.AdamW(p, lr=0.1), {"padding_idx": 0}),
    ],
    ids=["adamw", "sgd", "sparse", "by frequency", "padding"],
)
def test_vectors_of_old_tokens_stay_and_those_of_new_ones_learn(make: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Words(**options)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, exclude=["head"])
    memory.update([OLD])
    before = model.words.weight.detach().clone()
    optimizer = make(model.parameters())
    memory.attach(optimizer)
    trained(model, optimizer)
    moved = (model.words.weight.detach() - before).norm(dim=1)
    # Weight decay would move the vector of the padding too, though it has no gradient.
    assert moved[:4].max() == 0
    assert moved[4:8].min() > 0.01
    assert memory.check(OLD).leak == 0


def test_a_rare_token_is_nearly_free_and_a_frequent_one_is_not() -> None:
    torch.manual_seed(0)
    model = Words()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=1.0, exclude=["head"])
    memory.update([torch.tensor([[0] * 99 + [5]])])
    before = model.words.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory.attach(optimizer)
    model(torch.tensor([[0, 5]])).sum().backward()
    gradient = model.words.weight.grad
    assert gradient is not None
    wanted = -0.1 * gradient.clone()
    optimizer.step()
    share = (model.words.weight.detach() - before).norm(dim=1) / wanted.norm(dim=1)
    assert share[0] == 0
    assert float(share[5]) == pytest.approx(1 - 2 / (1 + math.sqrt(99)), rel=1e-4)


class Positions(nn.Module):
    """Words, the numbers of their positions in any shape, and one task for the whole batch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.words, self.positions, self.task = nn.Embedding(12, 6), nn.Embedding(8, 6), nn.Embedding(3, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1]).reshape(self.shape))
        return self.words(tokens) + positions + self.task(torch.tensor(1))


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_what_is_looked_up_once_counts_for_every_sample_of_the_batch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Positions(shape)
    short, long = torch.randint(0, 12, (7, 2)), torch.randint(0, 12, (4, 5))
    for batches in ([short, long], [*short.split(1), *long.split(1)], [*short.split(3), *long.split(3)]):
        memory = sgp.GradientMemory(model, threshold=1.0, alpha=1.0)
        memory.update(batches)
        positions, task = memory.subspaces["positions"], memory.subspaces["task"]
        assert isinstance(positions, TokenSubspace)
        assert positions.tokens.tolist() == [0, 1, 2, 3, 4]
        root = math.sqrt(4 / 11)  # of what the shorter texts lack
        rare = 2 * root / (1 + root)
        assert positions.importance[0].tolist() == pytest.approx([1.0, 1.0, rare, rare, rare])
        assert isinstance(task, TokenSubspace)
        assert task.tokens.tolist() == [1]


def test_an_embedding_that_its_forward_writes_to_is_not_said_to_be_protected() -> None:
    with pytest.warns(UserWarning, match="Embedding: unknown layer type"):
        memory = sgp.GradientMemory(Words(max_norm=1.0), threshold=1.0)
    assert "words" not in {layer.layer for layer in memory.capacity().layers}
    assert memory.capacity().frozen["words.weight"] == "unknown layer type Embedding"


def test_a_memory_with_tokens_is_the_same_after_save_and_load(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Words()
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=2.0, exclude=["head"])
    memory.update([OLD])
    memory.save(tmp_path / "memory.safetensors")
    again = sgp.GradientMemory(model, threshold=0.9, alpha=2.0, exclude=["head"])
    again.load(tmp_path / "memory.safetensors")
    for space in (memory.subspaces["words"], again.subspaces["words"]):
        assert isinstance(space, TokenSubspace)
        assert space.state_dict().keys() == {"tokens", "importance", "size"}
    mine, theirs = memory.subspaces["words"].state_dict(), again.subspaces["words"].state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    smaller = Words()
    smaller.words = nn.Embedding(10, 6)
    other = sgp.GradientMemory(smaller, threshold=0.9, alpha=2.0, exclude=["head"])
    with pytest.raises(ValueError, match="layer 'words'"):
        other.load(tmp_path / "memory.safetensors")


class Speaker(nn.Module):
    """An output layer that has the weight of the embedding, and a bias over the vocabulary that is frozen for that."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.words, self.hidden, self.out = nn.Embedding(words, 16), nn.Linear(16, 16), nn.Linear(16, words)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.hidden(self.words(tokens)).relu())
        return result

    def resize(self, words: int) -> None:
        """As transformers does: new modules with the rows that fit, and the rest new."""
        new = Speaker(words)
        both = min(words, self.words.num_embeddings)
        with torch.no_grad():
            new.words.weight[:both] = self.words.weight[:both]
            new.out.bias[:both] = self.out.bias[:both]
        self.words, self.out = new.words, new.out


def speak(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int = 10) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.filterwarnings("ignore:the model has 16-bit weights")
def test_vectors_of_blocked_tokens_stay_to_the_bit(every: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Speaker().to(dtype)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=1.0)
    memory.update([OLD])
    space = memory.subspaces["words"]
    assert isinstance(space, TokenSubspace)
    assert space.fixed.tolist() == [2, 3]  # the most frequent ones
    before = model.words.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    memory.attach(optimizer, every=every)
    speak(model, optimizer, NEW, 40)
    same = (model.words.weight.detach() == before).all(dim=1)
    assert same.nonzero().flatten().tolist() == [2, 3]


@pytest.mark.parametrize("every", [1, 4])
def test_a_vocabulary_may_grow_between_tasks(every: int, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Speaker()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([OLD])
    memory.save(tmp_path / "memory.safetensors")
    before = model.words.weight.detach().clone()
    first = torch.optim.AdamW(model.parameters(), lr=0.05)
    memory.attach(first, every=every)
    speak(model, first, NEW, 3)  # with every=4 these are still to be projected when the vocabulary grows
    model.resize(14)
    later = torch.tensor([[12, 13, 4], [13, 5, 12]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    memory.attach(optimizer, every=every)
    news = model.words.weight.detach()[12:].clone()
    speak(model, optimizer, later, 8)
    assert float((model.words.weight.detach()[OLD.unique()] - before[OLD.unique()]).abs().max()) < 1e-6
    assert float((model.words.weight.detach()[12:] - news).norm()) > 0.01
    check = memory.check(OLD)
    assert check.leak < 1e-5
    assert {layer.layer for layer in check.layers} == {"words", "hidden", "out"}
    memory.update([later])
    space = memory.subspaces["words"]
    assert isinstance(space, TokenSubspace)
    assert space.dimension == 14
    assert set(space.tokens.tolist()) == {0, 1, 2, 3, 4, 5, 12, 13}
    again = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    again.load(tmp_path / "memory.safetensors")
    assert again.subspaces["words"].dimension == 14


def test_a_vocabulary_that_grows_is_no_training_that_nobody_projected() -> None:
    torch.manual_seed(0)
    model = Speaker()
    memory = sgp.GradientMemory(model, threshold=1.0)
    memory.update([OLD])
    model.resize(14)
    memory.update([OLD])
    assert memory.tasks == 2
    model.resize(15)
    with torch.no_grad():
        model.words.weight[3] += 1
    with pytest.raises(RuntimeError, match="layer 'words' was trained by an optimizer that is not attached"):
        memory.update([OLD])


def test_a_vocabulary_that_shrinks_is_refused_before_anything_is_trained() -> None:
    model = Speaker()
    memory = sgp.GradientMemory(model, threshold=1.0)
    memory.update([OLD])
    model.resize(8)
    with pytest.raises(ValueError, match=r"layer 'words' has changed .* 1 x 8 .* 1 x 12.* restore the layer"):
        memory.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"reference: 'words.weight' has shape \(12, 16\), the model's has \(8, 16\)"):
        memory.check(OLD)


def test_no_matrix_of_tokens_by_tokens_is_ever_made() -> None:
    size = 200_000  # a matrix of which would be 320 GB
    model = nn.Sequential(nn.Embedding(size, 2))
    memory = sgp.GradientMemory(model, threshold=0.99, alpha=1.0)
    memory.update([torch.arange(0, size, 1000).unsqueeze(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    memory.attach(optimizer)
    model(torch.tensor([[0, 1]])).sum().backward()
    optimizer.step()
    assert memory.capacity().bytes < 10_000
