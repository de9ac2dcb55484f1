"""A model that is sharded over two processes by fully_shard learns the same as one process."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from projection.process_pair import run_processes
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import sgp
from sgp import storage
from sgp.projection.layer_types import Block
from sgp.projection.sharded import LocalRows, cut_to_shard, gather_whole, get_local
from sgp.projection.subspace import Subspace

try:
    from transformers.pytorch_utils import Conv1D
except ImportError:
    Conv1D = None

Outcome = dict[str, Any]


class Net(nn.Module):
    """Every kind of block. The shards of most are uneven, and of one layer the second is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)  # its bias is sharded at other rows
        self.conv = nn.Conv1d(6, 6, 3, padding=1, groups=3)  # the second group is divided between the shards
        self.turned = nn.Linear(6, 5) if Conv1D is None else Conv1D(5, 6)
        self.norm = nn.LayerNorm(5)
        self.narrow = nn.Linear(5, 5)
        self.one = nn.Linear(5, 1)
        self.read = nn.Linear(6, 11, bias=False)
        self.read.weight = self.words.weight  # protected from both sides

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.attention(x, x, x)[0]
        x = x + self.cross(x, x[..., :4], x[..., :3])[0]
        x = self.conv(x.mT).mT.contiguous().tanh()
        y = self.narrow(self.norm(self.turned(x))).tanh()
        return self.one(y)[..., 0] + self.read(x).square().mean(-1)


def spread(model: nn.Module, **options: Any) -> None:
    """Shard a model, if there are several processes."""
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for module in (model.attention, model.conv, model.narrow):
            fully_shard(module, **options)
        fully_shard(model, **options)


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def memory_of(model: nn.Module, **options: Any) -> sgp.GradientMemory:
    return sgp.GradientMemory(model, threshold=0.9, alpha=3.0, **options)


def learner(**options: Any) -> tuple[Net, sgp.GradientMemory]:
    model = network()
    spread(model)
    return model, memory_of(model, **options)


def batch(seed: int) -> Tensor:
    return torch.randint(0, 5 + seed % 6, (8, 5), generator=torch.Generator().manual_seed(seed))


def mine(tokens: Tensor) -> Tensor:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return tokens[rank::size]


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        (model(mine(batch(seed))) - 1).square().mean().backward()
        optimizer.step()


def adamw(model: nn.Module) -> AdamW:
    # Some gradients are zero except for rounding, which a smaller eps would scale to a full step.
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather_whole(value).clone() for name, value in model.named_parameters()}


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Functions that the two processes run, and a single one with all of the data for comparison.


def learns(optimizer_of: Callable[[nn.Module], Optimizer], **options: Any) -> Outcome:
    """Return the outcome of two tasks and some more steps."""
    model = network()
    spread(model, **options)
    memory = memory_of(model)
    optimizer = optimizer_of(model)
    hook = memory.attach(optimizer)
    memory.update([mine(batch(seed)) for seed in range(3)])
    first = memory.state_dict()["fingerprints"]
    train(model, optimizer, range(3, 23))
    check = memory.check(batch(0))
    by_reference = memory.check(batch(0), reference=weights(network()))
    memory.update([mine(batch(seed)) for seed in range(20, 23)])
    train(model, optimizer, range(23, 28))
    return {
        "weights": weights(model),
        "fingerprints": first,
        "digest": storage.digest(memory.state_dict()),
        "ranks": {name: space.rank.tolist() for name, space in memory.subspaces.items()},
        "modes": hook.modes,
        "reasons": hook.reasons,
        "drift": [check.drift, by_reference.drift, *(layer.drift for layer in check.layers)],
        "captured": [layer.captured for layer in check.layers],
        "leak": check.leak,
        "edits": edits(model, memory),
    }


def edits(model: nn.Module, memory: sgp.GradientMemory) -> list[float]:
    """Return the differences between projections of whole changes and of the same changes in shards."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    found = []
    for name, layer in memory.layers.items():
        own = [parameter.tensor for parameter in layer.parameters]
        changes = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in own]
        plain = memory.project(changes[0], name, *changes[1:])
        if not isinstance(own[0], DTensor):
            continue
        shards = [
            distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None)
            for change, p in zip(changes, own, strict=True)
        ]
        cut = memory.project(shards[0], name, *shards[1:])
        for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (plain, cut)), strict=True):
            found.append(float((one - gather_whole(other)).abs().max()))
    return found


def with_adamw() -> Outcome:
    return learns(adamw)


def with_sgd() -> Outcome:
    return learns(lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9))


def on_replicas() -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh

    return learns(adamw, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))


def of_uneven_loaders() -> Outcome:
    rank = dist.get_rank() if dist.is_initialized() else None
    shards = {0: range(3), 1: range(3, 4), None: range(4)}
    _, memory = learner()
    memory.update([batch(seed) for seed in shards[rank]])
    outcome = {"bases": {name: space.state_dict() for name, space in memory.subspaces.items()}}
    memory.update([batch(seed) for seed in shards[rank]], samples=20)
    return outcome | {"digest": storage.digest(memory.state_dict())}


def seldom(peeks: bool) -> dict[str, Tensor]:
    model, memory = learner()
    optimizer = adamw(model)
    hook = memory.attach(optimizer, every=4)
    memory.update([mine(batch(0))])
    for seed in range(10):
        train(model, optimizer, range(seed, seed + 1))
        if peeks:
            with hook.projected(), torch.no_grad():
                model(mine(batch(0)))
    model.eval()
    with torch.no_grad():
        model(mine(batch(0)))  # some of the weights stay gathered
    hook.flush()
    return weights(model)


def every_few_steps() -> Outcome:
    return {"weights": seldom(peeks=False), "peeked": seldom(peeks=True)}


def in_bfloat16() -> Outcome:
    model = network().bfloat16()
    spread(model)
    memory = memory_of(model)
    optimizer = adamw(model)
    hook = memory.attach(optimizer)
    memory.update([mine(batch(0))])
    before = weights(model)
    train(model, optimizer, range(8))
    masters = hook.state_dict()["masters"]
    rounded = all(
        torch.equal(master.bfloat16(), get_local(model.get_parameter(name))) for name, master in masters.items()
    )
    return {"before": before, "masters": masters, "rounded": rounded, "space": memory.subspaces["narrow"].state_dict()}


def sharded_later() -> Outcome:
    """Return the outcome of sharding a model that has a memory."""
    model = network()
    memory = memory_of(model)
    memory.update([batch(seed) for seed in range(3)], distributed=False)
    spread(model)
    optimizer = adamw(model)
    memory.attach(optimizer)
    train(model, optimizer, range(3, 8))
    check = memory.check(batch(0))
    memory.update([mine(batch(3))])
    return {"weights": weights(model), "drift": [check.drift, *(layer.drift for layer in check.layers)]}


def interrupted(out: Path) -> Outcome:
    """Return the outcome of resuming from torch.distributed.checkpoint and a file of the memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def end(model: nn.Module, memory: sgp.GradientMemory, optimizer: Optimizer) -> Outcome:
        train(model, optimizer, range(8, 12))
        memory.update([mine(batch(8))])
        train(model, optimizer, range(12, 14))
        return {"weights": weights(model), "digest": storage.digest(memory.state_dict())}

    model, memory = learner()
    optimizer = adamw(model)
    hook = memory.attach(optimizer, every=3)
    memory.update([mine(batch(0))])
    train(model, optimizer, range(3, 8))
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=out / "checkpoint")
    hook_state = hook.state_dict()
    if dist.get_rank() == 0:
        memory.save(out / "checkpoint" / "memory.safetensors")
    dist.barrier()
    outcome = {"straight": end(model, memory, optimizer)}

    torch.manual_seed(7)
    model = Net()
    spread(model)
    optimizer = adamw(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=out / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    memory = memory_of(model)
    memory.load(out / "checkpoint" / "memory.safetensors")
    memory.attach(optimizer, every=3).load_state_dict(hook_state)
    return outcome | {"resumed": end(model, memory, optimizer)}


def failing() -> Outcome:
    """Return the errors of failures between two passes on the second process only."""
    is_second = dist.get_rank() == 1
    model, memory = learner()
    before = storage.digest(memory.state_dict())

    def torn() -> Iterator[Tensor]:
        yield batch(0)
        if is_second:
            raise OSError("the disk is gone")
        yield batch(1)

    def mask(tokens: Tensor) -> Tensor:
        return tokens.nothing if is_second else tokens.new_ones(tokens.shape, dtype=torch.bool)

    errors = {
        "empty": raised(lambda: memory.update([] if is_second else [batch(0), batch(1)])),
        "torn": raised(lambda: memory.update(torn())),
        "mask": raised(lambda: memory.update([batch(0), batch(1)], mask=mask)),
        "settings": raised(lambda: memory.update([batch(0)], samples={"nothing": 1} if is_second else 5)),
    }
    hook = model.norm.register_forward_hook(lambda _, __, output: output * (torch.nan if is_second else 1))
    errors["nan"] = raised(lambda: memory.update([batch(0), batch(1)]))
    hook.remove()
    unchanged = storage.digest(memory.state_dict()) == before
    memory.update([batch(0)])
    return {"errors": errors, "unchanged": unchanged, "tasks": memory.tasks}


def refused() -> Outcome:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4))

    model = plain()
    early = memory_of(model)
    early_optimizer = SGD(model.parameters(), lr=0.1)
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    columns = raised(lambda: memory_of(model))
    later = raised(lambda: early.attach(SGD(model.parameters(), lr=0.1)))
    update = raised(lambda: early.update([torch.randn(3, 4)]))
    memory_of(nn.Sequential(nn.Linear(4, 4), model), exclude=["1"])

    model = plain()
    memory = memory_of(model)
    early_optimizer = SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    optimizer = raised(lambda: memory.attach(early_optimizer))
    alone = raised(lambda: memory.update([torch.randn(3, 4)], distributed=False))

    model = plain()
    fully_shard(model, ignored_params={model[0].bias})
    halves = raised(lambda: memory_of(model))
    memory_of(model, bias="freeze")

    inner = plain()
    fully_shard(nn.Sequential(inner))
    part = raised(lambda: memory_of(inner))

    model = plain()
    for name, parameter in list(model[0].named_parameters()):
        cut = distribute_tensor(parameter.detach(), inner[0].weight.device_mesh, [Shard(0)])
        setattr(model[0], name, nn.Parameter(cut))
    others = raised(lambda: memory_of(model))

    model, memory = learner()
    memory.update([batch(0)])
    stranger = adamw(model)
    train(model, stranger, range(1))
    unattached = raised(lambda: memory.update([batch(0)]))
    return {
        "columns": columns,
        "later": later,
        "update": update,
        "optimizer": optimizer,
        "alone": alone,
        "halves": halves,
        "part": part,
        "others": others,
        "unattached": unattached,
    }


def process(out: Path) -> None:
    """Run one of the processes."""
    dist.init_process_group("gloo")
    runs: list[Callable[[], Outcome]] = [
        with_adamw,
        with_sgd,
        on_replicas,
        of_uneven_loaders,
        every_few_steps,
        in_bfloat16,
        sharded_later,
        failing,
        refused,
    ]
    outcomes = {run.__name__: run() for run in runs} | {"interrupted": interrupted(out)}
    torch.save(outcomes, out / f"{dist.get_rank()}.pt")
    (out / f"{dist.get_rank()}.json").write_text(json.dumps({}))
    dist.destroy_process_group()


Outcomes = list[dict[str, Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return the outcomes of both processes, which run once for all tests."""
    out = tmp_path_factory.mktemp("sharded")
    run_processes(__file__, out)
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


def same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize("run", [with_adamw, with_sgd])
def test_the_gathered_weights_are_those_of_one_process(run: Callable[[], Outcome], outcomes: Outcomes) -> None:
    ours, theirs = (each[run.__name__] for each in outcomes)
    single = run()
    assert ours["digest"] == theirs["digest"]
    assert ours["fingerprints"] == theirs["fingerprints"] == single["fingerprints"]
    assert ours["ranks"] == single["ranks"]
    same_weights(ours["weights"], single["weights"])
    start = weights(network())
    moved = {name for name, weight in ours["weights"].items() if not torch.equal(weight, start[name])}
    assert moved == start.keys() - {"norm.weight", "norm.bias"}
    for outcome in (ours, theirs):
        assert outcome["drift"] == pytest.approx(single["drift"], rel=1e-3)
        assert outcome["captured"] == pytest.approx(single["captured"], rel=1e-5)
        assert outcome["leak"] < 1e-5
        assert len(outcome["edits"]) > len(outcome["ranks"])  # biases too
        assert max(outcome["edits"]) < 1e-5
    mode = "step" if run is with_adamw else "gradient"
    assert set(ours["modes"].values()) == {mode}
    assert ("sharded" in ours["reasons"]["narrow"]) == (run is with_sgd)


@pytest.mark.slow
def test_a_mesh_that_also_replicates_gives_the_same(outcomes: Outcomes) -> None:
    for outcome in outcomes:
        same_weights(outcome["on_replicas"]["weights"], outcome["with_adamw"]["weights"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*can hardly learn", "ignore:.*does not shuffle")
def test_processes_with_fewer_batches_wait_for_the_others(outcomes: Outcomes) -> None:
    ours, theirs = (each["of_uneven_loaders"] for each in outcomes)
    assert ours["digest"] == theirs["digest"]
    single = of_uneven_loaders()["bases"]
    assert ours["bases"].keys() == single.keys()
    for name, expected in single.items():
        found = ours["bases"][name]
        torch.testing.assert_close(found["importance"], expected["importance"], atol=1e-5, rtol=0)
        if "basis" in expected:
            dense = [
                space["basis"] @ (space["importance"].unsqueeze(-1) * space["basis"].mT) for space in (found, expected)
            ]
            torch.testing.assert_close(dense[0], dense[1], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
def test_several_steps_are_projected_at_once_and_evaluating_changes_nothing(outcomes: Outcomes) -> None:
    single = every_few_steps()["weights"]
    for outcome in outcomes:
        found = outcome["every_few_steps"]
        same_weights(found["weights"], single)
        assert all(torch.equal(found["peeked"][name], weight) for name, weight in found["weights"].items())


@pytest.mark.slow
def test_masters_of_16_bit_shards_do_not_leak(outcomes: Outcomes) -> None:
    ours, theirs = (each["in_bfloat16"] for each in outcomes)
    assert ours["rounded"]
    assert theirs["rounded"]
    change = {}
    for name in ("narrow.weight", "narrow.bias"):
        masters = [outcome["masters"][name] for outcome in (ours, theirs)]
        assert [len(master) for master in masters] == [3, 2]
        change[name] = torch.cat(masters) - ours["before"][name].float()
    space = Subspace(**ours["space"])
    matrix, bias = change["narrow.weight"].unsqueeze(0), change["narrow.bias"].unsqueeze(0)
    assert space.blocked
    assert float(matrix.norm()) > 1e-3
    assert space.compute_blocked_share(matrix, bias) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
def test_a_memory_of_the_whole_model_still_works_after_sharding(outcomes: Outcomes) -> None:
    single = sharded_later()
    for outcome in outcomes:
        same_weights(outcome["sharded_later"]["weights"], single["weights"])
        assert outcome["sharded_later"]["drift"] == pytest.approx(single["drift"], rel=1e-3)


@pytest.mark.slow
def test_a_run_resumes_from_a_distributed_checkpoint_to_the_same_bits(outcomes: Outcomes) -> None:
    for outcome in outcomes:
        straight, resumed = outcome["interrupted"]["straight"], outcome["interrupted"]["resumed"]
        assert straight["digest"] == resumed["digest"]
        for name, weight in straight["weights"].items():
            assert torch.equal(weight, resumed["weights"][name]), name


@pytest.mark.slow
def test_a_failure_between_passes_is_raised_in_all_and_nothing_changes(outcomes: Outcomes) -> None:
    ours, theirs = (each["failing"] for each in outcomes)
    causes = {
        "empty": "ValueError: the loader gave no batch",
        "torn": "OSError: the disk is gone",
        "mask": "AttributeError: 'Tensor' object has no attribute 'nothing'",
        "settings": "ValueError: samples: the pattern 'nothing'",
        "nan": "FloatingPointError: layer 'narrow'",
    }
    for name, cause in causes.items():
        assert theirs["errors"][name].startswith(cause)
        assert ours["errors"][name].startswith(f"RuntimeError: rank 1 failed, so the memory has not changed: {cause}")
    for outcome in (ours, theirs):
        assert outcome["unchanged"]
        assert outcome["tasks"] == 1


@pytest.mark.slow
def test_unsupported_layouts_are_refused_by_name(outcomes: Outcomes) -> None:
    for outcome in outcomes:
        errors = outcome["refused"]
        for name in ("columns", "later", "update"):
            assert errors[name].startswith("TypeError: parameter '0.weight' has the placements (Shard(dim=1),)")
            assert "exclude it" in errors[name]
        assert "build the optimizer after it" in errors["optimizer"]
        assert "the model is sharded" in errors["alone"]
        assert errors["halves"].startswith("TypeError: parameter '0.bias' has the placements ()")
        for name in ("part", "others"):
            assert errors[name].startswith("TypeError: parameter '0.weight' is distributed over processes")
        assert "not attached" in errors["unattached"]


@given(
    st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 7), st.integers(0, 2**16)
)
def test_projected_shards_are_shards_of_the_projected_whole(
    size: int, before: int, after: int, inputs: int, processes: int, seed: int
) -> None:
    block, outputs = Block("weight", "bias", rows=(before, before + size)), before + size + after
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(1, inputs + 1, 1, generator=generator, dtype=torch.float64)
    importance = torch.rand(1, 1, generator=generator, dtype=torch.float64)
    space = Subspace(basis / basis.norm(), importance, torch.ones(1, dtype=torch.int64))
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64)

    expected, expected_bias = weight.clone(), bias.clone()
    matrix, vector = block.view_matrix(expected), block.view_bias(expected_bias)
    space.subtract_projection_(matrix.clone(), vector.clone(), matrix, vector)
    length = -(-outputs // processes)
    for first in range(0, processes * length, length):
        rows = LocalRows(min(first, outputs), min(first + length, outputs), cast(Any, None), (0,))
        cut = cut_to_shard(block, space, weight.shape, rows, bias.shape)
        assert cut is not None
        own, own_bias = weight[rows.start : rows.stop].clone(), bias[rows.start : rows.stop].clone()
        matrix, vector = cut[0].view_matrix(own), cut[0].view_bias(own_bias)
        cut[1].subtract_projection_(matrix.clone(), vector.clone(), matrix, vector)
        torch.testing.assert_close(own, expected[rows.start : rows.stop])
        torch.testing.assert_close(own_bias, expected_bias[rows.start : rows.stop])


@pytest.mark.parametrize(
    ("block", "bias"),
    [
        (Block("weight", "bias", groups=2), None),
        (Block("weight", "bias", input_dim=0), None),
        (Block("q_proj_weight", "in_proj_bias", bias_rows=(4, 8)), torch.Size([12])),
    ],
    ids=["groups", "transposed", "bias elsewhere"],
)
def test_shards_that_enter_one_product_are_not_projected_alone(block: Block, bias: torch.Size | None) -> None:
    rows = LocalRows(0, 2, cast(Any, None), (0,))
    assert cut_to_shard(block, Subspace.empty(block.groups, 4), torch.Size([4, 4]), rows, bias) is None


def test_flat_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].weight._fsdp_flattened = True  # as in FullyShardedDataParallel
    with pytest.raises(TypeError, match="fully_shard instead"):
        memory_of(model)


if __name__ == "__main__":
    process(Path(sys.argv[1]))
    os._exit(0)  # the threads of the process group, which fully_shard keeps, may abort the interpreter at its end
