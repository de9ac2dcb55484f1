"""The supervised loop: the protocol's training, its metrics, and runs that repeat themselves to the bit."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, same_weights, small, stream_of, trace

from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.evaluation import evaluate, split_rows
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.networks import build_network
from sgp.experiments.optimizers import get_optimizer_state, restore_optimizer_state
from sgp.experiments.seeds import derive_seed, make_generator
from sgp.experiments.summary import read_summary
from sgp.experiments.supervised import SupervisedTrainer
from sgp.methods.finetune import Finetune

METHOD_NAMES = ("finetune", "gpm", "sgp")


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(method: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(tmp_path / name, small(method))
    run(tmp_path / "other", small(method, seed=1))
    assert trace(tmp_path / "one") == trace(tmp_path / "two")
    one, other = of_kind(events(tmp_path / "one"), "epoch"), of_kind(events(tmp_path / "other"), "epoch")
    assert all(ours["train_loss"] != theirs["train_loss"] for ours, theirs in zip(one, other, strict=True))


def by_hand(config: Any, stream: Stream) -> tuple[nn.Module, list[list[float]]]:
    """Plain SGD on one task after another, as one would write it without this package's loop."""
    network = build_network(config, stream)
    rows = []
    for position in range(len(stream)):
        task = stream[position]
        optimizer = torch.optim.SGD(network.parameters(), lr=config.trainer.lr)
        network.train()
        for epoch in range(config.trainer.epochs):
            order = torch.randperm(len(task.train), generator=make_generator(config.seed, "order", position, epoch))
            for batch in split_rows(order, config.trainer.batch):
                optimizer.zero_grad()
                F.cross_entropy(network(task.train.inputs[batch], task.head), task.train.labels[batch]).backward()
                optimizer.step()
        network.eval()
        row = []
        for earlier in range(position + 1):
            test = stream[earlier].test
            answers = network(test.inputs, stream[earlier].head).argmax(dim=1)
            row.append(100 * int((answers == test.labels).sum()) / len(test))
        rows.append(row)
    return network, rows


@pytest.mark.parametrize("kind", ["split", "permuted"])
def test_finetuning_is_a_plain_loop(kind: str, tmp_path: Path) -> None:
    config = small("finetune", kind=kind, tasks=2)
    learner = run(tmp_path, config)
    network, rows = by_hand(config, stream_of(config))
    assert same_weights(learner.network, network)
    assert learner.accuracies == rows


def test_heads_learn_at_a_rate_of_their_own(tmp_path: Path) -> None:
    config = small("finetune", kind="split", tasks=1, schedule="linear", head_lr=0.2)
    learner = run(tmp_path, config)
    task, network = stream_of(config)[0], build_network(config, stream_of(config))
    body = [parameter for name, parameter in network.named_parameters() if not name.startswith("heads.")]
    optimizers = torch.optim.SGD(body), torch.optim.SGD(network.heads.parameters())  # type: ignore[union-attr]
    epochs, n = config.trainer.epochs, len(task.train)
    for epoch in range(epochs):
        order = torch.randperm(n, generator=make_generator(config.seed, "order", 0, epoch))
        for number, batch in enumerate(split_rows(order, config.trainer.batch)):
            share = 1 - (epoch + number * config.trainer.batch / n) / epochs
            network.zero_grad()
            F.cross_entropy(network(task.train.inputs[batch], 0), task.train.labels[batch]).backward()
            for optimizer, rate in zip(optimizers, (config.trainer.lr, 0.2), strict=True):
                optimizer.param_groups[0]["lr"] = rate * share
                optimizer.step()
    for name, parameter in learner.network.named_parameters():
        torch.testing.assert_close(parameter, network.get_parameter(name))
    assert of_kind(events(tmp_path), "epoch")[0]["lr"] == config.trainer.lr


def test_head_lr_equal_to_lr_changes_nothing(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(head_lr), small("sgp", optimizer="adamw", lr=1e-3, head_lr=head_lr))
        for head_lr in (None, 1e-3)
    ]
    assert same_weights(runs[0].network, runs[1].network)


def test_head_lr_is_refused_if_no_head_is_trained(tmp_path: Path) -> None:
    config = small("pnn", head_lr=0.1)  # its columns have heads of their own
    with pytest.raises(ValueError, match="head_lr is the learning rate of the network's heads, but no head is trained"):
        SupervisedTrainer(config, stream_of(config), RunFolder(tmp_path))


def test_realign_fits_the_heads_of_earlier_tasks_to_moved_features(tmp_path: Path) -> None:
    config = small("finetune", tasks=2, lr=0.3)
    first = run(tmp_path / "first", replace(config, benchmark_settings=replace(config.benchmark_settings, tasks=1)))
    plain = run(tmp_path / "plain", config)
    aligned = run(tmp_path / "aligned", replace(config, trainer=replace(config.trainer, realign=True)))
    changed = {
        name
        for name, tensor in aligned.network.state_dict().items()
        if not torch.equal(tensor, plain.network.state_dict()[name])
    }
    assert changed == {"heads.0.weight", "heads.0.bias"}
    inputs = aligned.load_task(1).train.inputs
    answers = {
        learner: learner.network.eval()(inputs, 0).softmax(dim=1).detach() for learner in (first, plain, aligned)
    }
    drift = [(answers[learner] - answers[first]).norm() for learner in (plain, aligned)]
    assert 0 < drift[1] < drift[0] / 2


def test_realign_is_refused_for_a_shared_head(tmp_path: Path) -> None:
    config = small("finetune", kind="permuted", realign=True)
    with pytest.raises(ValueError, match="realign needs a network with a linear head for each task: all tasks share"):
        SupervisedTrainer(config, stream_of(config), RunFolder(tmp_path))
    # With one task there is no earlier head.
    run(tmp_path, replace(config, benchmark_settings=replace(config.benchmark_settings, tasks=1)))


def test_texts_are_evaluated_in_order_of_length_with_the_same_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("finetune")
    learner = SupervisedTrainer(config, stream_of(config), RunFolder(tmp_path))
    task, orders = learner.load_task(0), []

    def observed(*given: Any, order: Tensor, **options: Any) -> Any:
        orders.append(order)
        return evaluate(*given, order=order, **options)

    monkeypatch.setattr("sgp.experiments.supervised.evaluate", observed)
    plain = learner._evaluate(task.test, task, "test", 0)
    monkeypatch.setattr(learner.network, "token_mask", lambda inputs: inputs.flatten(1) > 0, raising=False)
    assert learner._evaluate(task.test, task, "test", 0) == pytest.approx(plain)
    lengths = [(task.test.inputs[order].flatten(1) > 0).sum(1) for order in orders]
    assert torch.equal(lengths[1], lengths[0].sort().values)
    assert not torch.equal(lengths[1], lengths[0])


def test_gpm_forgets_less_than_finetuning(tmp_path: Path) -> None:
    forgotten = {}
    for method in ("finetune", "gpm"):
        config = small(method, kind="permuted", epochs=3)
        run(tmp_path / method, config)
        forgotten[method] = bwt(read_summary(RunFolder(tmp_path / method)).accuracies)
    assert forgotten["gpm"] > forgotten["finetune"] + 5


def test_the_metrics_tell_every_epoch_and_task(tmp_path: Path) -> None:
    learner = run(tmp_path, small("sgp"))
    found = events(tmp_path)
    assert [entry["event"] for entry in found] == ["epoch", "epoch", "task"] * 3 + ["end"]
    for number, entry in enumerate(of_kind(found, "epoch")):
        assert (entry["task"], entry["epoch"], entry["lr"]) == (number // 2, number % 2 + 1, 0.1)
        assert 0 < entry["train_loss"] < 5
        assert 0 < entry["validation_loss"] < 5
        assert 0 <= entry["validation_accuracy"] <= 100
    stream = stream_of(learner.config)
    for position, entry in enumerate(of_kind(found, "task")):
        assert (entry["task"], entry["name"]) == (position, stream.names[position])
        assert len(entry["accuracies"]) == position + 1
        assert entry["free"].keys() == {"hidden.0", "hidden.1"}
        assert entry["capacity"] == 100
        assert entry["bytes"].keys() == {"network", "bases", "importances"}
        assert entry["bytes"]["network"] == 4 * sum(p.numel() for p in learner.network.parameters())
    matrix = read_summary(RunFolder(tmp_path)).accuracies
    assert found[-1] == {"event": "end", "acc": acc(matrix), "bwt": bwt(matrix)}


def test_the_last_accuracies_are_those_of_the_network_that_is_kept(tmp_path: Path) -> None:
    learner = run(tmp_path, small("sgp"))
    found = RunFolder(tmp_path).load()
    assert found is not None
    network = build_network(learner.config, learner.stream)
    network.load_state_dict(found[1]["network"])
    for position, accuracy in enumerate(learner.accuracies[-1]):
        task = learner.stream[position]
        score = evaluate(network, task.test, task.head, batch=16, order=torch.arange(len(task.test)))
        assert score.accuracy == accuracy


def test_the_tables_are_made_from_the_metrics(tmp_path: Path) -> None:
    run(tmp_path, small("gpm"))
    tasks = of_kind(events(tmp_path), "task")
    names = [task["name"] for task in tasks]

    def table(name: str) -> list[list[str]]:
        with (tmp_path / name).open(newline="") as file:
            return list(csv.reader(file))

    header, *rows = table("accuracy.csv")
    assert header == ["after task", *names]
    assert [[row[0], *map(float, row[1:])] for row in rows] == [[task["name"], *task["accuracies"]] for task in tasks]
    header, *rows = table("capacity.csv")
    assert header == ["after task", "layer", "free"]
    assert [float(row[2]) for row in rows] == [free for task in tasks for free in task["free"].values()]
    header, *rows = table("memory.csv")
    assert [int(row[2]) for row in rows] == [count for task in tasks for count in task["bytes"].values()]
    header, *rows = table("timing.csv")
    assert {row[1] for row in rows} == {"train", "validate", "checkpoint", "consolidate", "test"}
    assert all(float(row[2]) >= 0 for row in rows)


@pytest.mark.parametrize("settings", [{"kind": "split"}, {"kind": "permuted"}], ids=str)
def test_one_task_alone_is_a_run(settings: dict[str, Any], tmp_path: Path) -> None:
    learner = run(tmp_path, small("sgp", tasks=1, **settings))
    assert len(learner.accuracies) == 1
    assert events(tmp_path)[-1] == {"event": "end", "acc": learner.accuracies[0][0], "bwt": None}


def test_samples_cut_every_part_of_a_task(tmp_path: Path) -> None:
    config = small("gpm", samples=20)
    with RunFolder.begin(tmp_path, config, resume=False) as folder:
        learner = SupervisedTrainer(config, stream_of(config), folder)
        task, whole = learner.load_task(0), learner.stream[0]
        assert (len(task.train), len(task.validation), len(task.test)) == (20, 20, 20)
        assert set(map(tuple, task.train.inputs.tolist())) <= set(map(tuple, whole.train.inputs.tolist()))
        assert set(task.train.labels.tolist()) == {0, 1}
        assert torch.equal(task.train.inputs, learner.load_task(0).train.inputs)
        learner.run()
    # 300 inputs were wanted for the bases and 20 are there.
    assert all(0 < free < 1 for free in of_kind(events(tmp_path), "task")[0]["free"].values())


def test_the_best_weights_are_kept_with_patience_and_the_last_ones_otherwise(tmp_path: Path) -> None:
    # A rate at which the validation loss goes up and down.
    settings = {"kind": "permuted", "tasks": 1, "epochs": 8, "lr": 1.5, "samples": 100}
    patient = small("finetune", schedule="patience", patience=8, **settings)
    losses: dict[str, list[float]] = {}
    for name, config in (("patient", patient), ("constant", small("finetune", **settings))):
        learner = run(tmp_path / name, config)
        task = learner.load_task(0)
        order = torch.arange(len(task.validation))
        kept = evaluate(learner.network, task.validation, task.head, batch=256, order=order).loss
        seen = [entry["validation_loss"] for entry in of_kind(events(tmp_path / name), "epoch")]
        losses[name] = seen
        expected = min(seen) if name == "patient" else seen[-1]
        assert kept == pytest.approx(expected, rel=1e-5)
    assert losses["patient"] == losses["constant"]
    assert losses["patient"].index(min(losses["patient"])) < 7


def test_patience_ends_a_task_early(tmp_path: Path) -> None:
    settings = {"kind": "permuted", "tasks": 1, "epochs": 60, "lr": 1.5, "samples": 100}
    run(tmp_path, small("finetune", schedule="patience", patience=1, lr_min=0.5, **settings))
    rates = [entry["lr"] for entry in of_kind(events(tmp_path), "epoch")]
    assert len(rates) < 60
    assert set(rates) == {1.5, 0.75}


def test_the_fast_recipe_keeps_the_mean_of_the_weights(tmp_path: Path) -> None:
    config = small("sgp", recipe="fast", tasks=2, epochs=3)
    assert (config.trainer.schedule, config.trainer.average) == ("cosine", 0.98)
    learner = run(tmp_path, config)
    rates = [entry["lr"] for entry in of_kind(events(tmp_path), "epoch")]
    assert rates[:3] == pytest.approx([0.1, 0.075, 0.025])
    assert rates[3:] == rates[:3]
    # What is kept is what was validated at the end.
    task = learner.load_task(1)
    score = evaluate(learner.network, task.validation, task.head, batch=256, order=torch.arange(len(task.validation)))
    assert score.loss == pytest.approx(of_kind(events(tmp_path), "epoch")[-1]["validation_loss"], rel=1e-5)
    plain = run(tmp_path / "plain", replace(config, trainer=replace(config.trainer, average=0.0)))
    assert not same_weights(learner.network, plain.network)


def test_a_share_of_the_old_weights_is_kept_from_the_second_task_on(tmp_path: Path) -> None:
    config = small("finetune", tasks=2, epochs=2, schedule="cosine", average=0.9)
    halfway = replace(config, trainer=replace(config.trainer, interpolation_weight=0.5))
    first = run(tmp_path / "first", replace(config, benchmark_settings=replace(config.benchmark_settings, tasks=1)))
    plain, learner = run(tmp_path / "plain", config), run(tmp_path / "halfway", halfway)
    for name, tensor in learner.network.state_dict().items():
        ended, began = plain.network.state_dict()[name], first.network.state_dict().get(name)
        is_head = name.startswith("heads.")
        torch.testing.assert_close(tensor, ended if is_head or began is None else (ended + began) / 2)
    # What is kept is what was validated at the end.
    task = learner.load_task(1)
    score = evaluate(learner.network, task.validation, task.head, batch=256, order=torch.arange(len(task.validation)))
    found = of_kind(events(tmp_path / "halfway"), "epoch")[-1]["validation_loss"]
    assert score.loss == pytest.approx(found, rel=1e-5)


def test_a_checkpoint_without_what_a_mean_needs_is_told(tmp_path: Path) -> None:
    config = small("finetune", tasks=1, epochs=2, samples=60, schedule="cosine", average=0.9)
    with pytest.raises(Stop):
        run(tmp_path, config, stopping_at(2, "epoch"))
    file = tmp_path / "checkpoint.json"
    checkpoint = json.loads(file.read_text())
    del checkpoint["parts"]["averaged"], checkpoint["digest"]
    file.write_text(json.dumps(checkpoint))
    with pytest.raises(RunError, match="the checkpoint has no part 'averaged'"):
        run(tmp_path, config, resume=True)


def test_a_mean_of_the_weights_is_that_of_every_step(tmp_path: Path) -> None:
    config = small("finetune", tasks=1, epochs=2, schedule="constant", average=0.9)
    learner = run(tmp_path, config)
    passed: list[Tensor] = []

    class Noting(Finetune):
        """Sees the weights after every step."""

        def attach(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.register_step_post_hook(lambda *_: passed.append(self.network.hidden[0].weight.detach().clone()))  # type: ignore[index,union-attr]

    plain = replace(config, trainer=replace(config.trainer, average=0.0))
    with RunFolder.begin(tmp_path / "plain", plain, resume=False) as folder:
        other = SupervisedTrainer(plain, stream_of(plain), folder)
        other.method = Noting(other.network, config.method_settings)  # type: ignore[arg-type]
        other.run()
    mean = torch.zeros_like(passed[0], dtype=torch.float64)
    for weight in passed:
        mean = 0.9 * mean + 0.1 * weight.double()
    mean /= 1 - 0.9 ** len(passed)
    torch.testing.assert_close(learner.network.hidden[0].weight.double(), mean, rtol=1e-4, atol=1e-6)  # type: ignore[index,union-attr]


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(tmp_path: Path) -> None:
    config = small("finetune", lr=1e30)
    with pytest.raises(RunError, match=r"loss became \w+ in task 1 \(digits 0 and 1\), epoch 1; try a lower --lr"):
        run(tmp_path, config)
    assert events_or_none(tmp_path) == []


def events_or_none(path: Path) -> list[dict[str, Any]]:
    return events(path) if (path / "metrics.jsonl").exists() else []


def test_patience_without_validation_examples_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no validation examples"):
        run(tmp_path, small("finetune", schedule="patience", validation=1e-6))


def test_the_users_random_state_is_untouched(tmp_path: Path) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before, theirs = torch.get_rng_state(), np.random.get_state()
    run(tmp_path / "one", small("sgp"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(np.array_equal(a, b) for a, b in zip(theirs, np.random.get_state(), strict=True))
    torch.manual_seed(6)
    run(tmp_path / "two", small("sgp"))
    assert trace(tmp_path / "one") == trace(tmp_path / "two")


def test_more_evaluations_change_nothing(tmp_path: Path) -> None:
    config = small("sgp")
    run(tmp_path / "plain", config)
    with RunFolder.begin(tmp_path / "watched", config, resume=False) as folder:
        learner: SupervisedTrainer

        def evaluate_again(event: str, values: dict[str, Any]) -> None:
            for position in range(3):
                task = learner.load_task(position)
                evaluate(learner.network, task.train, task.head, batch=32, order=torch.randperm(len(task.train)))
            torch.randn(7)

        learner = SupervisedTrainer(config, stream_of(config), folder, evaluate_again)
        learner.run()
    assert trace(tmp_path / "plain") == trace(tmp_path / "watched")


class Dropping(nn.Module):
    """A network with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.heads = nn.ModuleList(nn.Linear(32, 2) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.heads[task](F.dropout(self.norm(self.hidden(x)).relu(), 0.5, self.training))
        return logits


def dropping(path: Path, config: Any, *callbacks: Any, resume: bool = False) -> SupervisedTrainer:
    """Run with a network that has dropout and stored statistics."""
    with RunFolder.begin(path, config, resume=resume) as folder:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Dropping()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sgp.experiments.supervised.build_network", lambda config, stream: network)
            learner = SupervisedTrainer(config, stream_of(config), folder, *callbacks)
        learner.run()
    return learner


@pytest.mark.parametrize("recipe", ["constant", "patience", "fast"])
@pytest.mark.parametrize("method", ["gpm", "finetune"])
def test_later_tasks_have_their_own_statistics_where_old_ones_stay(method: str, recipe: str, tmp_path: Path) -> None:
    learner = dropping(tmp_path / "run", small(method, tasks=3, **RECIPES[recipe]))
    network, kept = learner.network.eval(), learner.norms.state_dict()
    assert {path.split("/")[0] for path in kept} == ({"1", "2"} if method == "gpm" else set())
    task = learner.load_task(2)
    batch = task.train.inputs[:9], task.train.labels[:9]
    with learner.norms.use_statistics(2):
        own = -F.cross_entropy(network(batch[0], 2), batch[1], reduction="none")
    assert torch.equal(learner._compute_log_likelihood(task.head)(batch), own)
    score = learner._evaluate(task.test, task, "test", 0)
    if method == "gpm":
        hidden = network.get_submodule("hidden")
        mean = torch.stack([hidden(inputs).mean(0) for inputs, _ in learner._iterate_passes(2, [task])]).mean(0)
        torch.testing.assert_close(kept["2/norm.running_mean"], mean)
        assert not torch.allclose(network.get_buffer("norm.running_mean"), mean, rtol=0.1, atol=0.1)
        learner.norms.load_state_dict({})
        assert learner._evaluate(task.test, task, "test", 0).loss != score.loss


def test_mixed_statistics_change_the_scores_but_not_the_training(tmp_path: Path) -> None:
    runs = {
        kind: dropping(tmp_path / kind, small("sgp", tasks=2, norm_statistics=kind)) for kind in ("stored", "mixed")
    }
    assert same_weights(runs["stored"].network, runs["mixed"].network)
    for position in range(2):
        task = runs["mixed"].load_task(position)
        stored, mixed = (learner._evaluate(task.test, task, "test", 0) for learner in runs.values())
        assert stored.loss != pytest.approx(mixed.loss, rel=1e-3)


def test_examples_are_scored_in_an_order_of_the_task_and_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def observed(*given: Any, order: Tensor, **options: Any) -> Any:
        seen.append(order)
        return evaluate(*given, order=order, **options)

    monkeypatch.setattr("sgp.experiments.supervised.evaluate", observed)
    config = small("finetune", tasks=2, **{**RECIPES["patience"], "patience": 9, "epochs": 2})
    run(tmp_path / "one", config)
    one, seen = seen, []
    run(tmp_path / "two", config)
    assert all(map(torch.equal, one, seen))
    # Two epochs and the test, of one task and then of both.
    assert len(seen) == 3 + 4
    for sizes in ({len(seen[0])}, {len(seen[2])}):
        alike = [order.tolist() for order in seen if {len(order)} == sizes]
        assert len(alike) == len({tuple(order) for order in alike}) > 1


class Stop(BaseException):
    """Ends a run in the middle of things, as a signal does."""


def stopping_at(number: int, where: str) -> Callable[[str, dict[str, Any]], None]:
    """Return a callback that ends the run at the n-th event of a kind, before its checkpoint is written."""
    seen = 0

    def watch(event: str, values: dict[str, Any]) -> None:
        nonlocal seen
        seen += event == where
        if seen == number and event == where:
            raise Stop

    return watch


RECIPES: dict[str, dict[str, Any]] = {
    "constant": {},
    "patience": {"schedule": "patience", "patience": 1, "lr": 1.0, "lr_min": 0.3, "epochs": 4},
    "fast": {"schedule": "cosine", "average": 0.9},
    "halfway": {"schedule": "cosine", "average": 0.9, "interpolation_weight": 0.5},
    "mixed": {"schedule": "cosine", "average": 0.9, "norm_statistics": "mixed"},
    "texts": {"schedule": "linear", "optimizer": "adamw", "lr": 1e-3, "head_lr": 1e-2},
    "realigned": {"schedule": "cosine", "average": 0.9, "realign": True},
}
# Where not every method has the recipe's settings.
METHODS_OF = {"halfway": ("sgp", "finetune"), "mixed": ("sgp",)}


@pytest.mark.parametrize(
    ("method", "recipe"),
    [(method, recipe) for recipe in RECIPES for method in METHODS_OF.get(recipe, METHOD_NAMES)],
)
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bits(method: str, recipe: str, tmp_path: Path) -> None:
    config = small(method, samples=60, **RECIPES[recipe])
    whole = dropping(tmp_path / "whole", config)
    path = tmp_path / "stopped"
    stops = [("epoch", 1), ("epoch", 2), ("task", 1), ("epoch", 1), ("task", 1), ("task", 1), ("end", 1)]
    stopped = 0
    for event, number in stops:
        try:
            dropping(path, config, stopping_at(number, event), resume=True)
        except Stop:
            stopped += 1
    assert stopped == len(stops)
    resumed = dropping(path, config, resume=True)
    assert same_weights(whole.network, resumed.network)
    assert trace(path) == trace(tmp_path / "whole")


def test_a_run_that_is_stopped_right_after_a_checkpoint_has_its_tables_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("gpm")
    run(tmp_path / "whole", config)
    path, save = tmp_path / "stopped", RunFolder.save

    def save_and_stop(folder: RunFolder, progress: Any, *parts: Any) -> None:
        save(folder, progress, *parts)
        if progress["task"] == 3:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save_and_stop)
        with pytest.raises(Stop):
            run(path, config)
    run(path, config, resume=True)
    assert trace(path) == trace(tmp_path / "whole")


def test_a_finished_run_is_gone_on_with_to_no_effect(tmp_path: Path) -> None:
    config = small("sgp")
    run(tmp_path, config)
    before = trace(tmp_path)
    run(tmp_path, config, resume=True)
    assert trace(tmp_path) == before


def test_the_method_is_not_written_again_inside_a_task(tmp_path: Path) -> None:
    inodes: dict[str, set[tuple[str, int]]] = {}
    config = small("gpm", tasks=2, epochs=4)
    checkpoint = tmp_path / "checkpoint"

    def look(event: str, values: dict[str, Any]) -> None:
        if event == "epoch" and values["task"] == 1 and values["epoch"] > 2:
            for part, name in json.loads((tmp_path / "checkpoint.json").read_text())["parts"].items():
                inodes.setdefault(part, set()).add((name, (checkpoint / name).stat().st_ino))

    run(tmp_path, config, look)
    assert len(inodes["method"]) == 1
    assert len(inodes["network"]) == 2


def test_earlier_tasks_are_tested_without_their_training_inputs(tmp_path: Path) -> None:
    config = small("finetune", tasks=5, epochs=1)
    stream = stream_of(config)
    prepared = []

    def make(position: int) -> Task:
        def prepare(inputs: Tensor) -> Tensor:
            prepared.append(position)
            return inputs

        task = stream[position]
        return replace(task, train=Examples(task.train.inputs, task.train.labels, prepare))

    with RunFolder.begin(tmp_path, config, resume=False) as folder:
        SupervisedTrainer(config, replace(stream, make=make), folder).run()
    assert prepared == [0, 1, 2, 3, 4]


def test_a_shared_head_is_protected_and_heads_of_single_tasks_are_not(tmp_path: Path) -> None:
    shared = run(tmp_path / "permuted", small("gpm", kind="permuted", tasks=2, epochs=1))
    own = run(tmp_path / "split", small("gpm", kind="split", tasks=2, epochs=1))
    assert shared.method.measure_free().keys() == {"hidden.0", "hidden.1", "heads.0"}
    assert own.method.measure_free().keys() == {"hidden.0", "hidden.1"}


def test_the_network_is_the_seeds() -> None:
    config = small("finetune")
    stream = stream_of(config)
    state = torch.get_rng_state()
    one, two, other = (build_network(replace(config, seed=seed), stream) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert same_weights(one, two)
    assert not same_weights(one, other)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(0, "weights"))
        assert torch.equal(nn.Linear(64, 100).weight, one.hidden[0].weight)  # type: ignore[index,union-attr]
    bare = build_network(replace(config, trainer=replace(config.trainer, network_bias=False)), stream)
    assert all(not name.endswith("bias") for name, _ in bare.named_parameters())
    assert math.prod(one.hidden[0].weight.shape) == 6400  # type: ignore[index,union-attr]


def test_an_optimizer_goes_on_from_its_state_to_the_bit() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2))
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network, torch.optim.Adam(network.parameters(), lr=0.01)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        network(torch.randn(4, 3, 6, 6)).square().sum().backward()
        optimizer.step()

    whole, going = made()
    for seed in range(3):
        step(whole, going, seed)
    stopped, before = made()
    step(stopped, before, 0)
    resumed, after = made()
    resumed.load_state_dict(stopped.state_dict())
    restore_optimizer_state(after, get_optimizer_state(before))
    for seed in (1, 2):
        step(resumed, after, seed)
    assert same_weights(whole, resumed)
    assert all(
        value.stride() == parameter.stride()
        for parameter in resumed.parameters()
        for value in after.state[parameter].values()
        if value.dim()
    )
