"""Methods with a memory of examples: the forward passes of their steps, and BatchNorm statistics from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from sgp.methods import METHODS, Batch, Moment
from sgp.networks import MLP

REPLAY = ("er", "a-gem", "der")
NOW = Moment(0, 0.0, 0.0)


def make_method(name: str) -> Any:
    torch.manual_seed(0)
    return make_named(name, MLP((12, 16), (3, 3)))


def make_named(name: str, network: nn.Module, **settings: Any) -> Any:
    kind = METHODS[name]
    return kind(network, kind.Settings(**settings), exclude=["heads.*"])


def make_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 12, generator=generator), torch.randint(3, (8,), generator=generator)


def learn_task(method: Any, head: int) -> None:
    """Train on a task of one batch in one step."""
    method.begin_task(head, [make_batch(head)])
    optimizer = SGD(method.network.parameters(), lr=0.1)
    method.attach(optimizer)
    method.step(make_batch(head), head, NOW, optimizer)


@pytest.mark.parametrize(("name", "sizes"), [("er", [16]), ("fs-dgpm", [16]), ("a-gem", [8, 8]), ("der", [8, 8])])
def test_passes_are_what_a_step_runs_through_the_network(name: str, sizes: list[int]) -> None:
    method = make_method(name)
    assert [len(inputs) for inputs, _ in method.get_passes(make_batch(0), 0)] == [8]  # nothing is stored yet
    learn_task(method, 0)
    seen: list[Tensor] = []
    passes = method.get_passes(make_batch(1), 1)
    inputs = torch.cat([inputs for inputs, _ in passes])
    heads = torch.cat([torch.as_tensor(head).expand(len(inputs)) for inputs, head in passes])
    assert [len(inputs) for inputs, _ in passes] == sizes
    assert heads.tolist() == [1] * 8 + [0] * 8
    assert torch.equal(inputs[:8], make_batch(1)[0])
    assert {tuple(row) for row in inputs[8:].tolist()} == {tuple(row) for row in make_batch(0)[0].tolist()}
    method.network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    learn_task(method, 1)
    # FS-DGPM has steps uphill of half a batch too.
    assert {len(inputs) for inputs in seen} - {4} == set(sizes)


def test_stored_statistics_are_of_the_passes_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
    from experiments.small import run, small

    estimated: list[list[tuple[Tensor, Any]]] = []
    name = "sgp.experiments.norm_policy.estimate_statistics"
    monkeypatch.setattr(name, lambda _, passes: estimated.append(list(passes)) or {})
    for attempt in ("one", "two"):
        torch.manual_seed(ord(attempt[0]))  # whatever the random state outside of the run
        run(tmp_path / attempt, small("er", tasks=2, epochs=2))
    first, second = estimated[:4], estimated[4:]
    assert all(isinstance(heads, Tensor) and set(heads.tolist()) == {0, 1} for _, heads in first[-1])
    for ours, theirs in zip(first[-1], second[-1], strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_replay_forgets_less_than_finetuning_also_where_tasks_share_a_head(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
    from experiments.small import events, run, small

    forgotten = {}
    for method in ("finetune", *REPLAY):
        run(tmp_path / method, small(method, kind="permuted", epochs=3))
        forgotten[method] = events(tmp_path / method)[-1]["bwt"]
    assert min(forgotten[name] for name in REPLAY) > forgotten["finetune"] + 5
