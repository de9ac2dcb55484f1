"""TRGP: which tasks are trusted, what their scales change, and what is stored afterwards."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch, Moment
from sgp.methods.gpm import GPM, GPMSettings, get_matrices
from sgp.methods.trgp import TRGP, Learned, Space, TRGPSettings, UnionMemory, compute_basis
from sgp.networks import MLP, ResNet18
from sgp.projection import Subspace
from sgp.projection.gram import InputGram
from sgp.projection.subspace import find_minimal_rank

WIDTHS = (12, 16, 8)
NOW = Moment(0, 0.0, 0.0)


def make_mlp(*, bias: bool = True) -> MLP:
    torch.manual_seed(0)
    return MLP(WIDTHS, (3, 3, 3, 3), bias=bias)


def make_method(network: nn.Module | None = None, **settings: Any) -> TRGP:
    return TRGP(network or make_mlp(), TRGPSettings(**settings), exclude=["heads.*"])


def make_batches(task: int, shape: tuple[int, ...] = (WIDTHS[0],)) -> list[Batch]:
    """Return batches whose inputs lie in a few directions; all tasks share half of them, so some can be trusted."""
    generator = torch.Generator().manual_seed(task)
    size = math.prod(shape)
    shared = torch.randn(2, size, generator=torch.Generator().manual_seed(99))
    inputs = torch.randn(40, 4, generator=generator) @ torch.cat([shared, torch.randn(2, size, generator=generator)])
    labels = torch.randint(3, (40,), generator=generator)
    return list(zip((inputs / 3).view(-1, *shape).split(20), labels.split(20), strict=True))


def learn(method: TRGP, task: int, batches: list[Batch] | None = None, *, epochs: int = 4, lr: float = 0.1) -> None:
    """Train as the trainer does, without consolidation."""
    batches = batches or make_batches(task)
    method.begin_task(task, batches)
    optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=lr)
    method.attach(optimizer)
    method.network.train()
    for batch in batches * epochs:
        method.step(batch, task, NOW, optimizer)
    method.network.eval()


def consolidate(method: TRGP, task: int, batches: list[Batch] | None = None) -> None:
    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.compute_logits(batch[0], task), batch[1], reduction="none")

    method.consolidate(batches or make_batches(task), log_likelihood)


def learn_tasks(tasks: int, network: nn.Module | None = None, **settings: Any) -> TRGP:
    method = make_method(network, **settings)
    for task in range(tasks):
        learn(method, task)
        consolidate(method, task)
    return method


def join_bias(module: nn.Module) -> Tensor:
    """Return a layer's weight with its bias as one more column, [out, d]."""
    assert isinstance(module, nn.Linear | nn.Conv2d)
    weight = module.weight.detach().flatten(1)
    return weight if module.bias is None else torch.cat([weight, module.bias.detach().unsqueeze(1)], dim=1)


def test_without_a_trusted_task_trgp_takes_the_steps_of_gpm_to_the_bit() -> None:
    trgp = learn_tasks(1, trust_threshold=1.0)  # a share above 1 there is not
    gpm = GPM(make_mlp(), GPMSettings(), exclude=["heads.*"])
    optimizer = torch.optim.SGD(gpm.network.parameters(), lr=0.1)
    gpm.attach(optimizer)

    def train_gpm(task: int) -> None:
        for inputs, labels in make_batches(task) * 4:
            optimizer.zero_grad()
            F.cross_entropy(gpm.network(inputs, task), labels).backward()
            optimizer.step()

    train_gpm(0)
    gpm.consolidate(make_batches(0), lambda batch: gpm.network(batch[0], 0)[:, 0])
    # A first task has no old bases to sort among the new ones.
    for layer, subspace in gpm.memory.subspaces.items():
        assert torch.equal(subspace.basis, trgp.memory.subspaces[layer].basis)
    learn(trgp, 1)
    train_gpm(1)
    assert not trgp._regions
    for name, value in gpm.network.state_dict().items():
        assert torch.equal(value, trgp.network.state_dict()[name]), name
    inputs = make_batches(1)[0][0]
    assert torch.equal(trgp.compute_logits(inputs, 1), trgp.network(inputs, 1))


def test_no_task_trusted_at_all_is_a_setting() -> None:
    method = learn_tasks(2, trust_tasks=0)
    learn(method, 2)
    assert not method._regions
    assert method.count_bytes()["scales"] == 0


class OneLayer(nn.Module):
    """A layer whose gradient a test chooses: with logits x W^T, labels 0 and W = 0 it is proportional to -mean x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor, head: int | Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        return logits


@pytest.mark.parametrize(
    ("gradient", "trusted"),
    [
        # |G S_j| of the three tasks, which have axes {0}, {1} and {1, 2}, in units of |G|.
        ([1.0, 0.0, 0.0, 0.0], ["0"]),
        ([0.0, 1.0, 0.0, 0.0], ["1", "2"]),
        ([0.8, 0.0, 0.6, 0.0], ["0", "2"]),
        ([0.6, 0.0, 0.8, 0.0], ["2", "0"]),
        ([0.6, 0.55, 0.55, 0.0], ["2", "0"]),  # all three pass, and two are taken
        ([0.49, 0.0, 0.0, 0.88], []),
        ([0.51, 0.0, 0.0, 0.86], ["0"]),
        ([0.0, 0.0, 0.0, 1.0], []),
    ],
    ids=str,
)
def test_the_two_tasks_that_contain_most_of_the_gradient_are_trusted_if_they_contain_half(
    gradient: list[float], trusted: list[str]
) -> None:
    method = TRGP(OneLayer(), TRGPSettings())
    batches = [(torch.eye(4)[:1].repeat(3, 1), torch.zeros(3, dtype=torch.long))]
    method.begin_task(0, batches)
    consolidate(method, 0, [(torch.eye(4), torch.zeros(4, dtype=torch.long))])
    (space,) = method.memory.subspaces.values()
    # Bases are axes, though in some order; the tasks have some of them each.
    axes = space.basis[0].abs().argmax(dim=0)
    nothing = torch.zeros(1, 4, 0)
    for head, mine in enumerate(([0], [1], [1, 2])):
        chosen = torch.tensor([[int(axis) in mine for axis in axes]])
        method._learned[str(head)] = Learned(spaces={"layer": Space(chosen=chosen, outside=nothing)}, scales={})
    method.begin_task(3, [(torch.tensor([gradient] * 5), torch.zeros(5, dtype=torch.long))])
    assert [region.head for region in method._regions.get("layer", [])] == trusted


def test_only_the_set_number_of_samples_is_used() -> None:
    method = TRGP(OneLayer(), TRGPSettings(trust_samples=2))
    consolidate_first(method)
    one, other = torch.eye(4)[[0]].repeat(2, 1), torch.eye(4)[[3]].repeat(50, 1)
    zero = torch.zeros(2, dtype=torch.long)
    method.begin_task(1, [(one, zero), (other, torch.zeros(50, dtype=torch.long))])
    assert list(method._regions) == ["layer"]
    method.begin_task(1, [(other[:2], zero), (one, zero)])
    assert not method._regions


def consolidate_first(method: TRGP) -> None:
    """Consolidate a first task along axis 0."""
    batches = [(torch.eye(4)[:1].repeat(3, 1), torch.zeros(3, dtype=torch.long))]
    method.begin_task(0, batches)
    consolidate(method, 0, batches)


def compute_effective_weight(method: TRGP, name: str, head: int) -> tuple[Tensor, Tensor | None]:
    """Return W_eff of a layer for a task as matrices [groups, out, inputs], and the bias that is protected with W."""
    layer = method._layers[name]
    weight, bias = get_matrices(layer, method._get_parameters(layer))
    change, bias_change = method._compute_change(layer, method._get_regions(str(head)).get(name, []))
    return weight + change, None if bias is None or bias_change is None else bias + bias_change


@pytest.mark.parametrize("bias", [True, False])
def test_the_effective_weight_is_that_of_the_dense_formula(bias: bool) -> None:
    method = learn_tasks(2, make_mlp(bias=bias))
    learn(method, 2)
    assert {len(regions) for regions in method._regions.values()} == {2}
    for layer, regions in method._regions.items():
        W = join_bias(method.network.get_submodule(layer)).double()
        dense = W.clone()
        for region in regions:
            S = region.space[0].double()
            Q = torch.eye(S.shape[1]).double() + region.scale[0].detach().double()
            assert float(region.scale.detach().norm()) > 1e-3
            dense += W @ S @ Q @ S.T - W @ S @ S.T
        weight, offset = compute_effective_weight(method, layer, 2)
        found = weight[0] if offset is None else torch.cat([weight[0], offset[0].unsqueeze(1)], dim=1)
        assert torch.allclose(found.double(), dense, atol=1e-6)
    # The forward pass forms no such weight, and gives the same.
    inputs = make_batches(2)[0][0]
    x = inputs
    for number in range(2):
        weight, offset = compute_effective_weight(method, f"hidden.{number}", 2)
        x = F.linear(x, weight[0], None if offset is None else offset[0]).relu()
    assert torch.allclose(method.compute_logits(inputs, 2), method.network.heads(x, 2), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_runs_with_the_effective_weight(groups: int) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, padding=1, groups=groups)
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: Tensor, head: int) -> Tensor:
            logits: Tensor = self.heads[head](self.conv(x).relu().mean((2, 3)))
            return logits

    torch.manual_seed(0)
    # Scales have something to do where not all directions are taken.
    method = make_method(Small(), threshold=0.9, trust_threshold=0.0)
    shape = (4, 5, 5)
    for task in range(2):
        learn(method, task, make_batches(task, shape))
        consolidate(method, task, make_batches(task, shape))
    learn(method, 2, make_batches(2, shape))
    (regions,) = method._regions.values()
    conv = method.network.get_submodule("conv")
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    blocks = join_bias(conv).double().view(groups, 6 // groups, -1)
    dense = blocks.clone()
    for region in regions:
        S = region.space.double()
        assert float(region.scale.detach().norm()) > 1e-4
        dense += blocks @ S @ region.scale.detach().double() @ S.mT
    weight, offset = compute_effective_weight(method, "conv", 2)
    assert offset is not None
    found = torch.cat([weight, offset.unsqueeze(-1)], dim=-1)
    assert torch.allclose(found.double(), dense, atol=1e-6)
    inputs = make_batches(2, shape)[0][0]
    whole = F.conv2d(inputs, weight.reshape(conv.weight.shape), offset.flatten(), padding=1, groups=groups)
    heads: Any = method.network.get_submodule("heads")
    assert torch.allclose(method.compute_logits(inputs, 2), heads[2](whole.relu().mean((2, 3))), atol=1e-5)


def test_scales_start_at_the_identity_and_are_learned() -> None:
    method = learn_tasks(1)
    method.begin_task(1, make_batches(1))
    inputs = make_batches(1)[0][0]
    assert method._regions
    assert torch.equal(method.compute_logits(inputs, 1), method.network(inputs, 1))
    learn(method, 1)
    assert all(float(scale.detach().norm()) > 1e-3 for scale in method._scales.values())
    assert not torch.allclose(method.compute_logits(inputs, 1), method.network(inputs, 1), atol=1e-3)


def test_weights_along_a_trusted_space_are_constant() -> None:
    constant, live = learn_tasks(2), learn_tasks(2)
    for method in (constant, live):
        method.begin_task(2, make_batches(2))
    for layer, regions in live._regions.items():  # W S in each step, with its part in the gradient
        live._regions[layer] = [type(region)(region.head, region.space, region.scale) for region in regions]
    for method in (constant, live):
        optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=0.1)
        method.attach(optimizer)
        for batch in make_batches(2) * 10:
            method.step(batch, 2, NOW, optimizer)
    before = learn_tasks(2).network.state_dict()
    for name, value in constant.trained_module.state_dict().items():
        other = live.trained_module.state_dict()[name]
        assert torch.allclose(value, other, atol=1e-5), name
        if name.startswith("network.hidden") and name.endswith("weight"):
            assert float((value - before[name.removeprefix("network.")]).norm()) > 1e-2


def test_each_task_keeps_its_own_scales_and_outputs() -> None:
    method = make_method(threshold=1.0)  # all of a task's energy is protected, so that nothing may change
    answers: list[Tensor] = []
    for task in range(3):
        learn(method, task)
        consolidate(method, task)
        answers.append(method.compute_logits(torch.cat([x for x, _ in make_batches(task)]), task).detach())
        kept = {layer: dict(scales) for layer, scales in method._learned[str(task)]["scales"].items()}
        assert bool(kept) == (task > 0)
        for old, answer in enumerate(answers):
            inputs = torch.cat([x for x, _ in make_batches(old)])
            assert torch.allclose(method.compute_logits(inputs, old), answer, atol=1e-4), (task, old)
    assert method._learned["1"]["scales"]["hidden.0"].keys() == {"0"}
    assert method._learned["2"]["scales"]["hidden.0"].keys() == {"0", "1"}
    # The scales of one task mean nothing to another.
    inputs = torch.cat([x for x, _ in make_batches(2)])
    assert not torch.allclose(method.network(inputs, 2), answers[2], atol=1e-2)


def make_energies(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_a_tasks_space_is_the_smallest_set_of_old_and_new_directions_that_reaches_the_threshold() -> None:
    memory = UnionMemory(nn.Linear(6, 2, bias=False), threshold=0.9, alpha=math.inf)
    first = make_gram([3.0, 2.0, 1.0, 0, 0, 0])
    start = memory.grow_bases(Subspace.empty(1, 6), first, 1.0)
    assert start.rank.tolist() == [3]
    # Energies along the axes: old 16, 1, 0.25; new 9, 4, 0.5. The strongest that hold 95 % are 16, 9, 4.
    grown = memory.grow_bases(start, make_gram([4.0, 1.0, 0.5, 3.0, 2.0, 0.5**0.5]), 0.94)
    assert grown.rank.tolist() == [5]
    axes = grown.basis[0].abs().argmax(dim=0).tolist()
    assert axes == [0, 1, 2, 3, 4]
    _, space = memory._notes[id(grown)]
    assert space["chosen"].tolist() == [[True, False, False, True, True]]
    assert torch.equal(compute_basis(space, grown), grown.basis[..., [0, 3, 4]])
    # All that GPM asks is that old and new together reach it, to which weak old bases count too.
    gpm = start.grow(make_gram([4.0, 1.0, 0.5, 3.0, 2.0, 0.5**0.5]), threshold=0.94, alpha=math.inf)
    assert gpm.rank.tolist() == [5]
    assert find_minimal_rank(make_energies(16, 9, 4, 1, 0.5, 0.25), torch.tensor([30.75]).double(), 0.94).tolist() == [
        3
    ]


def make_gram(scales: list[float]) -> InputGram:
    """Return the Gram matrix of inputs along the axes with these lengths."""
    statistic = InputGram(1, len(scales))
    statistic.add(torch.diag(torch.tensor(scales)).unsqueeze(0)[:, [s > 0 for s in scales]])
    return statistic


def test_old_bases_count_only_if_they_are_among_the_strongest() -> None:
    memory = UnionMemory(nn.Linear(4, 2, bias=False), threshold=0.9, alpha=math.inf)
    start = memory.grow_bases(Subspace.empty(1, 4), make_gram([1.0, 1.0, 0, 0]), 1.0)
    task = [0.5, 0.5, 1.0, 0.5**0.5]  # energies 0.25, 0.25; 1, 0.5
    # At 0.74 GPM needs one new direction beside both old bases, the smallest set is the two new ones.
    assert start.grow(make_gram(task), threshold=0.74, alpha=math.inf).rank.tolist() == [3]
    grown = memory.grow_bases(start, make_gram(task), 0.74)
    assert grown.rank.tolist() == [4]
    assert memory._notes[id(grown)][1]["chosen"].tolist() == [[False, False, True, True]]


def test_the_published_off_by_one_leaves_the_strongest_new_direction_unprotected() -> None:
    memory = UnionMemory(nn.Linear(6, 2, bias=False), threshold=0.9, alpha=math.inf)
    memory.without_strongest = True
    start = memory.grow_bases(Subspace.empty(1, 6), make_gram([3.0, 2.0, 0, 0, 0, 0]), 1.0)
    assert start.rank.tolist() == [2]
    assert memory._notes[id(start)][1]["outside"].shape == (1, 6, 0)
    grown = memory.grow_bases(start, make_gram([1.0, 0.1, 3.0, 2.0, 1.5, 0]), 0.99)
    assert grown.basis[0].abs().argmax(dim=0).tolist() == [0, 1, 3, 4]
    assert (grown.rank.tolist(), grown.importance.tolist()) == ([4], [[1.0, 1.0, 1.0, 1.0]])
    _, space = memory._notes[id(grown)]
    assert space["chosen"].tolist() == [[True, False, True, True]]
    assert compute_basis(space, grown)[0].abs().argmax(dim=0).tolist() == [0, 3, 4, 2]
    # Where nothing is new, nothing is left out.
    same = memory.grow_bases(grown, make_gram([1.0, 0, 0, 1.0, 0, 0]), 0.9)
    assert (same.rank.tolist(), memory._notes[id(same)][1]["outside"].shape[-1]) == ([4], 0)


def test_in_reference_the_first_layer_decides_for_all() -> None:
    for scaling, expected in (("by-layer", {"hidden.1"}), ("by-first-layer", set())):
        method = learn_tasks(1, scaling=scaling)
        spaces = method._learned["0"]["spaces"]
        nothing = torch.zeros_like(spaces["hidden.0"]["chosen"])
        spaces["hidden.0"] = Space(chosen=nothing, outside=spaces["hidden.0"]["outside"])
        method.begin_task(1, make_batches(1))
        assert set(method._regions) == expected


@pytest.mark.parametrize("representation", ["scaled", "plain"])
def test_bases_come_from_inputs_under_scaled_weights_or_as_published_from_the_plain_network(
    representation: str,
) -> None:
    method = learn_tasks(1, representation=representation)
    learn(method, 1, epochs=20)
    inputs = torch.cat([x for x, _ in make_batches(1)])
    answers = {"scaled": method.compute_logits(inputs, 1).detach(), "plain": method.network(inputs, 1).detach()}
    assert float((answers["scaled"] - answers["plain"]).norm()) > 0.1
    seen: list[Tensor] = []
    handle = method.network.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    consolidate(method, 1)
    handle.remove()
    torch.testing.assert_close(torch.cat(seen), answers[representation])
    # The task itself is answered with its scales, whatever its bases were found from.
    torch.testing.assert_close(method.compute_logits(inputs, 1), answers["scaled"])
    assert method._learned["1"]["scales"].keys() == {"hidden.0", "hidden.1"}


def test_an_update_of_the_memory_that_fails_leaves_the_scales_of_the_task() -> None:
    method = learn_tasks(1, representation="plain")
    learn(method, 1)
    inputs = make_batches(1)[0][0]
    before = method.compute_logits(inputs, 1)

    def fail(batch: Batch) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        method.consolidate(make_batches(1), fail)
    assert torch.equal(method.compute_logits(inputs, 1), before)


def test_unscaled_layers_have_no_scales() -> None:
    method = learn_tasks(1, unscaled="hidden.0")
    method.begin_task(1, make_batches(1))
    assert set(method._regions) == {"hidden.1"}
    with pytest.raises(ValueError, match="unscaled: the pattern 'fc' matches no module"):
        make_method(unscaled="fc")


def test_bytes_are_those_of_bases_spaces_and_scales() -> None:
    method = learn_tasks(3)
    assert method.count_bytes()["regions"] == 0
    spaces = [space for task in method._learned.values() for space in task["spaces"].values()]
    assert method.count_bytes()["spaces"] == sum(space["chosen"].numel() for space in spaces)
    ranks = {task: method._learned[task]["spaces"]["hidden.0"]["chosen"].sum().item() for task in "01"}
    other = {task: method._learned[task]["spaces"]["hidden.1"]["chosen"].sum().item() for task in "01"}
    # The second task may trust one, the third two.
    expected = sum(4 * count**2 for count in (ranks["0"], other["0"], *ranks.values(), *other.values()))
    assert method.count_bytes()["scales"] == expected
    assert method.count_bytes()["bases"] == sum(space.basis.nbytes for space in method.memory.subspaces.values())
    method.begin_task(3, make_batches(3))
    assert method.count_bytes()["regions"] > 0


def test_norm_layers_are_frozen_or_trained_as_set() -> None:
    for norms in ("freeze", "free"):
        torch.manual_seed(0)
        method = make_method(ResNet18((3, 32, 32), (3, 3)), norms=norms, memory_samples=8, trust_samples=8)
        batches = [(torch.randn(8, 3, 32, 32), torch.arange(8) % 3)]
        learn(method, 0, batches, epochs=1)
        consolidate(method, 0, batches)
        before = method.network.get_parameter("norm1.weight").detach().clone()
        learn(method, 1, batches, epochs=1)
        assert torch.equal(method.network.get_parameter("norm1.weight"), before) == (norms == "freeze")
