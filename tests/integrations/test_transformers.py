"""The callback for the Trainer of transformers, on a tiny BERT with random weights."""

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp import storage

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate; of the extra 'transformers'")
from sgp.integrations.transformers import GradientMemoryCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Layers with many different inputs are nearly full at a threshold of 1.
    pytest.mark.filterwarnings("ignore:.*can hardly learn"),
    # Loaders request pinned memory even without an accelerator.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Padded sentences of words that differ between tasks; the first word determines the class."""

    def __init__(self, task: int, n: int = 12) -> None:
        generator = torch.Generator().manual_seed(task)
        self.words = torch.randint(1 + 20 * task, 21 + 20 * task, (n, 5), generator=generator)
        self.lengths = torch.randint(3, 6, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(5) < self.lengths[index]).long()
        words = self.words[index]
        return {"input_ids": words * mask, "attention_mask": mask, "labels": words[0] % 2}


def make_batch(task: int) -> dict[str, Tensor]:
    rows = [Words(task)[i] for i in range(len(Words(task)))]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def make_bert(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=8,
            initializer_range=0.1,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=2,
        )
    )


def make_memory(model: nn.Module, threshold: float = 1.0, alpha: float = math.inf) -> sgp.GradientMemory:
    return sgp.GradientMemory(model, threshold=threshold, alpha=alpha)


def compute_outputs(model: Any, task: int) -> Tensor:
    with torch.no_grad():
        return model.eval()(**make_batch(task)).logits.clone()


def make_trainer(model: Any, callback: Any, task: int, folder: Path, **settings: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **settings,
        },
    )
    callbacks = [callback] if callback is not None else []
    return transformers.Trainer(model, arguments, train_dataset=Words(task), eval_dataset=Words(0), callbacks=callbacks)


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("settings", "options", "allowed"),
    [
        pytest.param({}, {}, 1e-4, id="AdamW and a linear schedule"),
        pytest.param(
            {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
            {},
            1e-4,
            id="accumulation, clipping, cosine",
        ),
        pytest.param(REENTRANT, {}, 1e-4, id="reentrant checkpointing"),
        pytest.param(NOT_REENTRANT, {}, 1e-4, id="checkpointing"),
        pytest.param({"optim": "sgd", "learning_rate": 0.5}, {}, 1e-4, id="SGD"),
        pytest.param({}, {"every": 4}, 1e-4, id="every 4 steps"),
        pytest.param({"bf16": True}, {}, 0.05, id="bfloat16 autocast"),
        pytest.param({"num_train_epochs": 2, "max_steps": -1}, {"samples": 12}, 1e-4, id="epochs"),
    ],
)
# PyTorch warns if no input of a checkpointed layer needs a gradient, such as the outputs of the embeddings.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_outputs_of_the_first_task_do_not_change_while_the_second_is_trained(
    settings: dict[str, Any], options: dict[str, Any], allowed: float, tmp_path: Path
) -> None:
    model = make_bert()
    memory = make_memory(model)
    callback = GradientMemoryCallback(memory, **options)
    make_trainer(model, callback, 0, tmp_path, **settings).train()
    assert memory.tasks == 1
    plain = copy.deepcopy(model)
    old, new = compute_outputs(model, 0), compute_outputs(model, 1)

    make_trainer(model, callback, 1, tmp_path, **settings).train()
    make_trainer(plain, None, 1, tmp_path, **settings).train()
    assert memory.tasks == 2
    assert callback.hook is None
    assert measure_drift(compute_outputs(plain, 0), old) > 0.1
    assert measure_drift(compute_outputs(model, 0), old) < allowed
    assert measure_drift(compute_outputs(model, 1), new) > 0.05  # the second task is learned


def learn_first_task(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, sgp.GradientMemory]:
    """Return a model and its memory after the first task."""
    model = make_bert().to(dtype)
    memory = make_memory(model, 0.9, 2.0)
    make_trainer(model, GradientMemoryCallback(memory), 0, folder, max_steps=3).train()
    return model, memory


def assert_same_memory(a: sgp.GradientMemory, b: sgp.GradientMemory) -> None:
    assert storage.digest(a.state_dict()) == storage.digest(b.state_dict())


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


HALF = "ignore:the model has 16-bit weights"


@pytest.mark.parametrize(
    ("options", "dtype", "step"),
    [
        pytest.param({"samples": 5}, torch.float32, 7, id="in the last epoch"),
        pytest.param({"every": 2}, torch.float32, 5, id="every 2 steps"),
        pytest.param({}, torch.bfloat16, 5, id="bfloat16 weights", marks=pytest.mark.filterwarnings(HALF)),
    ],
)
def test_a_training_that_is_resumed_ends_with_the_same_bits(
    options: dict[str, Any], dtype: torch.dtype, step: int, tmp_path: Path
) -> None:
    model, memory = learn_first_task(tmp_path / "first", dtype)
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": step}  # in the middle of an epoch of 3
    make_trainer(model, GradientMemoryCallback(memory, **options), 1, tmp_path / "run", **settings).train()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {f"checkpoint-{step}", "checkpoint-8"}

    fresh = make_bert().to(dtype)
    again = make_memory(fresh, 0.9, 2.0)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")  # as if the run had been killed
    callback = GradientMemoryCallback(again, **options)
    make_trainer(fresh, callback, 1, tmp_path / "run", **settings).train(resume_from_checkpoint=True)
    assert_same_weights(fresh, model)
    assert_same_memory(again, memory)
    assert again.tasks == 2


@pytest.mark.parametrize("step", [2, 4])
def test_an_interrupted_training_does_not_affect_a_resumed_one(step: int, tmp_path: Path) -> None:
    class Break(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise KeyboardInterrupt

    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    model, memory = learn_first_task(tmp_path)
    twin, other = learn_first_task(tmp_path)
    make_trainer(model, GradientMemoryCallback(memory, every=8), 1, tmp_path / "whole", **saving).train()

    broken = make_trainer(twin, GradientMemoryCallback(other, every=8), 1, tmp_path / "run", **saving)
    broken.add_callback(Break)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = make_trainer(twin, GradientMemoryCallback(other, every=8), 1, tmp_path / "run", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert broken.optimizer is not None  # the optimizer still exists
    assert_same_weights(twin, model)
    assert_same_memory(other, memory)


def test_a_checkpoint_may_be_in_another_folder(tmp_path: Path) -> None:
    model, memory = learn_first_task(tmp_path / "first")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(model, GradientMemoryCallback(memory), 1, tmp_path / "run", **settings).train()
    moved = (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "moved")

    fresh = make_bert()
    again = make_memory(fresh, 0.9, 2.0)
    resumed = make_trainer(fresh, GradientMemoryCallback(again, checkpoint=moved), 1, tmp_path / "other", **settings)
    resumed.train(resume_from_checkpoint=str(moved))
    assert_same_weights(fresh, model)
    assert_same_memory(again, memory)


def test_an_incomplete_or_wrong_checkpoint_is_refused(tmp_path: Path) -> None:
    model, memory = learn_first_task(tmp_path / "first")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(model, GradientMemoryCallback(memory), 1, tmp_path / "run", **settings).train()
    folders = [tmp_path / "run" / f"checkpoint-{step}" for step in (2, 4)]
    fresh = make_bert()
    again = make_memory(fresh, 0.9, 2.0)
    other = make_trainer(fresh, GradientMemoryCallback(again, checkpoint=folders[1]), 1, tmp_path / "run", **settings)
    with pytest.raises(ValueError, match="saved with other weights"):
        other.train(resume_from_checkpoint=str(folders[0]))
    (folders[0] / "memory.safetensors").unlink()
    damaged = make_trainer(fresh, GradientMemoryCallback(again), 1, tmp_path / "run", **settings)
    with pytest.raises(FileNotFoundError, match=r"memory\.safetensors is missing in .*checkpoint-2"):
        damaged.train(resume_from_checkpoint=str(folders[0]))
    assert again.tasks == 0


def test_evaluations_see_projected_weights_and_change_nothing(tmp_path: Path) -> None:
    found = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        model = make_bert(dropout=0.0)  # an evaluation changes the random state that dropout would use
        memory = make_memory(model)
        make_trainer(model, GradientMemoryCallback(memory), 0, tmp_path, max_steps=3).train()
        before = compute_outputs(model, 0)
        second = make_trainer(model, GradientMemoryCallback(memory, every=4), 1, tmp_path, max_steps=6, **settings)
        start = second.evaluate()["eval_loss"]  # of the first task
        second.train()
        assert measure_drift(compute_outputs(model, 0), before) < 1e-4
        found.append(model)
    losses = [line["eval_loss"] for line in second.state.log_history if "eval_loss" in line]
    assert len(losses) == 6
    assert losses == pytest.approx([start] * 6, rel=1e-4)
    assert_same_weights(*found)


def test_a_memory_may_belong_to_a_submodule(tmp_path: Path) -> None:
    model = make_bert()
    memory = make_memory(model.bert)
    make_trainer(model, GradientMemoryCallback(memory), 0, tmp_path, max_steps=3).train()
    with torch.no_grad():
        inputs = {name: value for name, value in make_batch(0).items() if name != "labels"}
        before = model.bert.eval()(**inputs).pooler_output.clone()
    make_trainer(model, GradientMemoryCallback(memory), 1, tmp_path, max_steps=3).train()
    with torch.no_grad():
        assert measure_drift(model.bert.eval()(**inputs).pooler_output, before) < 1e-4


def test_the_update_can_be_left_to_the_user(tmp_path: Path) -> None:
    model = make_bert()
    memory = make_memory(model)
    make_trainer(model, GradientMemoryCallback(memory, update=False), 0, tmp_path, max_steps=2).train()
    assert memory.tasks == 0


class Weighted(Words):
    """Sentences with a weight in the loss, which the model does not accept."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"weight": torch.tensor(1.0)}


class WeightedTrainer(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **kwargs: Any) -> Any:
        weight = inputs.pop("weight")
        outputs = model(**inputs)
        loss = outputs.loss * weight.mean()
        return (loss, outputs) if return_outputs else loss


class Strict(transformers.BertForSequenceClassification):  # type: ignore[misc]
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def make_weighted_trainer(model: Any, callback: Any, folder: Path) -> Any:
    arguments = make_trainer(model, None, 0, folder, max_steps=2, remove_unused_columns=False).args
    return WeightedTrainer(model, arguments, train_dataset=Weighted(0), callbacks=[callback])


def test_a_batch_that_does_not_fit_the_model_is_refused_before_training(tmp_path: Path) -> None:
    model = Strict(make_bert().config)
    before = copy.deepcopy(model)
    memory = make_memory(model)
    callback = GradientMemoryCallback(memory)
    refused = make_weighted_trainer(model, callback, tmp_path)
    with pytest.raises(TypeError, match="weight") as raised:
        refused.train()
    assert "give forward=" in raised.value.__notes__[0]
    assert refused.state.global_step == 0
    assert callback.hook is None
    assert_same_weights(model, before)

    def forward(batch: dict[str, Tensor]) -> Any:
        return model(**{name: value for name, value in batch.items() if name != "weight"})

    make_weighted_trainer(model, GradientMemoryCallback(memory, forward=forward), tmp_path).train()
    assert memory.tasks == 1


def test_a_mask_that_does_not_fit_is_refused_before_training(tmp_path: Path) -> None:
    model = make_bert()
    callback = GradientMemoryCallback(make_memory(model), mask=lambda batch: batch["attention_mask"][0])
    refused = make_trainer(model, callback, 0, tmp_path)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        refused.train()
    assert refused.state.global_step == 0


class Noisy(Words):
    """Sentences of which some words are replaced at random."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        return found | {"input_ids": torch.where(torch.rand(5) < 0.5, torch.randint(0, 60, (5,)), found["input_ids"])}


def test_the_trial_before_training_leaves_no_trace(tmp_path: Path) -> None:
    found = []
    for update in (True, False):
        model = make_bert()
        callback = GradientMemoryCallback(make_memory(model), update=update)
        settings: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1}
        arguments = make_trainer(model, None, 0, tmp_path, **settings).args
        transformers.Trainer(model, arguments, train_dataset=Noisy(0), callbacks=[callback]).train()
        found.append(model)
    assert_same_weights(*found)


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Any:
        for index in range(12):
            self.given += 1
            yield Words(0)[index]


def test_streamed_data_are_not_tried(tmp_path: Path) -> None:
    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert stream.given == 0

    model, stream = make_bert(), Stream()
    memory = make_memory(model)
    arguments = make_trainer(model, None, 0, tmp_path, max_steps=3).args
    callbacks = [GradientMemoryCallback(memory), Look()]
    transformers.Trainer(model, arguments, train_dataset=stream, callbacks=callbacks).train()
    assert memory.tasks == 1


def test_the_memory_is_detached_if_the_update_fails(tmp_path: Path) -> None:
    model = make_bert()
    memory = make_memory(model)
    memory.update([make_batch(0)])
    calls = []

    def forward(batch: dict[str, Tensor]) -> Any:
        calls.append(model(**batch))
        if len(calls) > 1:
            raise RuntimeError("the update fails")

    callback = GradientMemoryCallback(memory, forward=forward)
    failing = make_trainer(model, callback, 1, tmp_path, max_steps=2)
    with pytest.raises(RuntimeError, match="the update fails"):
        failing.train()
    assert callback.hook is None
    assert not failing.optimizer.optimizer._optimizer_step_pre_hooks


def test_training_continues_after_a_failed_evaluation(tmp_path: Path) -> None:
    model = make_bert()
    memory = make_memory(model)
    make_trainer(model, GradientMemoryCallback(memory), 0, tmp_path, max_steps=3).train()
    before = compute_outputs(model, 0)
    callback = GradientMemoryCallback(memory, every=4)
    second = make_trainer(model, callback, 1, tmp_path, eval_strategy="steps", eval_steps=2)

    def failing(*_: Any) -> dict[str, float]:
        raise RuntimeError("no such metric")

    second.compute_metrics = failing
    with pytest.raises(RuntimeError, match="no such metric"):
        second.train()
    second.compute_metrics = None
    second.train()
    assert memory.tasks == 2
    assert measure_drift(compute_outputs(model, 0), before) < 1e-4


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each scalar that TensorBoard reads in a folder."""
    pytest.importorskip("tensorboard", reason="of the extra 'tensorboard'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return found


def test_tensorboard_receives_capacity_leak_and_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="of the extra 'tensorboard'")
    model = make_bert()
    memory = make_memory(model, 0.9, 2.0)
    for task in range(2):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / f"task-{task}"))
        settings = {"eval_strategy": "steps", "eval_steps": 4, "report_to": ["tensorboard"]}
        trainer = make_trainer(model, None, task, tmp_path, **settings)
        trainer.add_callback(GradientMemoryCallback(memory, log=trainer.log, check=[make_batch(0)]))
        trainer.train()
    first, second = (read_events(tmp_path / f"task-{task}") for task in range(2))
    free = "train/sgp/free/bert.encoder.layer.0.output.dense"
    assert [step for step, _ in first[free]] == [0, 6]
    assert first[free][0][1] == 1.0
    assert first[free][1][1] == second[free][0][1] > second[free][1][1] > 0
    assert 0.9 <= first[free.replace("free", "captured")][0][1] <= 1
    assert not [tag for tag in first if "drift" in tag]  # there is no earlier task
    assert [step for step, _ in second["train/sgp/output_drift"]] == [4, 6, 6]  # the last step is evaluated too
    assert 0 < second["train/sgp/output_drift"][1][1] < 1
    assert max(value for _, value in second[free.replace("free", "leak")]) < 1e-4
    capacity = {layer.layer: layer.free for layer in memory.capacity().layers}
    assert second[free][1][1] == pytest.approx(capacity["bert.encoder.layer.0.output.dense"], rel=1e-5)


@pytest.mark.parametrize("steps", [2, 6])
def test_nothing_is_logged_in_a_step(steps: int, tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []
    model = make_bert()
    callback = GradientMemoryCallback(make_memory(model), log=logged.append)
    make_trainer(model, callback, 0, tmp_path, max_steps=steps).train()
    assert len(logged) == 2


def test_checks_that_are_not_logged_are_refused() -> None:
    memory = make_memory(make_bert())
    with pytest.raises(ValueError, match=r"pass log=trainer\.log"):
        GradientMemoryCallback(memory, check=[make_batch(0)])
    with pytest.raises(TypeError, match="looks like a single batch"):
        GradientMemoryCallback(memory, log=print, check=make_batch(0))


class TwoHeads(nn.Module):
    """BERT with a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = make_bert(dropout=0.0).bert
        self.heads = nn.ModuleList(nn.Linear(32, 2) for _ in range(2))
        self.task = 0

    def compute_features(self, batch: Any) -> Tensor:
        output = self.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return output.pooler_output

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.compute_features({"input_ids": input_ids, "attention_mask": attention_mask})
        logits = self.heads[self.task](features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits} if labels is not None else logits


def compute_first_logits(model: TwoHeads, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.heads[0](model.eval().compute_features(batch))


def learn_two_heads(folder: Path, *, realign: bool, resume: int = 0) -> tuple[TwoHeads, sgp.GradientMemory, Tensor]:
    """Return a model that has learned two tasks, and the first head's logits for the second task before it."""
    torch.manual_seed(0)
    model = TwoHeads()
    memory = sgp.GradientMemory(model, threshold=0.8, alpha=1.0, exclude=["heads.*"])
    make_trainer(model, GradientMemoryCallback(memory), 0, folder / "first", max_steps=3).train()
    before = compute_first_logits(model, make_batch(1))
    model.task = 1
    options = {"heads": model.heads[0], "features": model.compute_features} if realign else {}
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    second = make_trainer(model, GradientMemoryCallback(memory, **options), 1, folder / "second", **settings)
    second.train(resume_from_checkpoint=str(folder / "second" / f"checkpoint-{resume}") if resume else None)
    return model, memory, before


def test_heads_of_earlier_tasks_are_realigned_also_after_a_training_is_resumed(tmp_path: Path) -> None:
    plain, _, before = learn_two_heads(tmp_path / "plain", realign=False)
    model, memory, _ = learn_two_heads(tmp_path / "run", realign=True)
    assert_same_weights(model.bert, plain.bert)
    moved = measure_drift(compute_first_logits(plain, make_batch(1)), before)
    assert moved > 0.05
    assert measure_drift(compute_first_logits(model, make_batch(1)), before) < moved / 2
    resumed, again, _ = learn_two_heads(tmp_path / "run", realign=True, resume=4)
    assert_same_weights(resumed, model)
    assert_same_memory(again, memory)


def test_heads_that_cannot_be_realigned_are_refused_before_training(tmp_path: Path) -> None:
    model = make_bert()
    memory = make_memory(model)
    with pytest.raises(ValueError, match="heads= needs features="):
        GradientMemoryCallback(memory, heads=model.classifier)
    memory.update([make_batch(0)])
    protected = GradientMemoryCallback(memory, heads=model.classifier, features=lambda batch: model.bert(**batch)[1])
    refused = make_trainer(model, protected, 1, tmp_path)
    with pytest.raises(ValueError, match=r"'classifier' is protected.*exclude="):
        refused.train()
    assert refused.state.global_step == 0
