"""The benchmark of kept abilities, on a tiny causal language model with random weights."""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft", reason="of the extra 'peft'")

from bench.smollm2.__main__ import main, name_run, train  # noqa: E402
from bench.smollm2.measure import measure_answers, measure_loss  # noqa: E402
from bench.smollm2.methods import METHODS, Finetune, RandomBases, Settings  # noqa: E402
from bench.smollm2.table import list_commands, make_table  # noqa: E402
from bench.smollm2.tasks import PromptTask, pad_texts, read_task, split_batches  # noqa: E402

WORDS = 40
OPTIONS = argparse.Namespace(steps=12, batch=4, lr=1e-2, verbose=False)
SETTINGS = Settings(threshold=0.98, every=4, rank=4, strength=10.0)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def texts(seed: int, first: int = 0, last: int = 10) -> list[dict[str, Tensor]]:
    """Return two batches of texts that have some of the words only."""
    tokens = torch.randint(first, last, (6, 7), generator=torch.Generator().manual_seed(seed))
    return split_batches({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, 3)


def prompt_task() -> PromptTask:
    """Return a task whose answer is told by the first of three words."""
    prompts = [([20 + index % 2, 25 + index % 7, 30], index % 2) for index in range(28)]
    return PromptTask("parity", torch.tensor([32, 33]), prompts, prompts, prompts)


def make_method(name: str, model: nn.Module, path: Path, settings: Settings = SETTINGS) -> Finetune:
    return METHODS[name](model, texts(0), settings, path / "cache")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "frozen"])
def test_every_method_learns_two_tasks(name: str, tmp_path: Path) -> None:
    model, task = language_model(), prompt_task()
    method = make_method(name, model, tmp_path)
    before = measure_answers(model, task, task.validation)[1]
    for seed in range(2):
        method.begin_task()
        train(method, task, OPTIONS, seed=seed)
        if seed == 0:
            method.end_task(list(task.sample_batches(2, 4, seed)))
    method.finish()
    assert measure_answers(model, task, task.validation)[1] < before - 0.1
    assert method.count_bytes() >= 0


@pytest.mark.parametrize("name", ["gpm", "sgp", "lora-memory", "ewc", "interpolation"])
def test_methods_that_protect_forget_less_than_finetuning_does(name: str, tmp_path: Path) -> None:
    rises = {}
    for each in (name, "finetune"):
        model = language_model()
        method = make_method(each, model, tmp_path, Settings(threshold=0.98, every=4, strength=1e5, share=0.5))
        before = measure_loss(model, texts(1))
        method.begin_task()
        train(method, prompt_task(), OPTIONS, seed=0)
        method.finish()
        rises[each] = measure_loss(model, texts(1)) - before
    assert rises[name] < rises["finetune"] / 2


@pytest.mark.parametrize("name", ["gpm", "sgp", "lora-memory", "ewc"])
def test_what_was_computed_from_the_calibration_text_is_kept(name: str, tmp_path: Path) -> None:
    states = []
    for calibration in (texts(0), []):
        model = language_model()
        method = METHODS[name](model, calibration, SETTINGS, tmp_path / "cache")
        torch.manual_seed(1)
        method.begin_task()
        train(method, prompt_task(), OPTIONS, seed=0)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_frozen_trains_nothing(tmp_path: Path) -> None:
    assert make_method("frozen", language_model(), tmp_path).parameters == []


def test_frozen_norms_move_no_norm(tmp_path: Path) -> None:
    model = language_model()
    before = copy.deepcopy(model.state_dict())
    method = make_method("frozen-norms", model, tmp_path)
    method.begin_task()
    train(method, prompt_task(), OPTIONS, seed=0)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "norm" not in name}


def test_all_the_way_back_is_the_base_model(tmp_path: Path) -> None:
    model = language_model()
    before = copy.deepcopy(model.state_dict())
    method = make_method("interpolation", model, tmp_path, Settings(share=1.0))
    train(method, prompt_task(), OPTIONS, seed=0)
    assert not torch.equal(model.state_dict()["model.norm.weight"], before["model.norm.weight"])
    method.finish()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (1.0, 80, 80), (0.25, 10, 30)])
def test_replay_puts_calibration_texts_into_a_share_of_the_places(
    share: float, least: int, most: int, tmp_path: Path
) -> None:
    method = make_method("replay", language_model(), tmp_path, Settings(share=share))
    batches = list(method.mix(prompt_task().sample_batches(20, 4, seed=0), seed=0))
    assert least <= sum(int((batch["input_ids"] < 10).all(1).sum()) for batch in batches) <= most
    assert all(batch["input_ids"].shape == (4, 4) for batch in batches)


def test_random_bases_have_the_ranks_and_importances_of_the_memory(tmp_path: Path) -> None:
    model = language_model()
    wanted, found = make_method("sgp", model, tmp_path), make_method("random-bases", model, tmp_path)
    assert isinstance(found, RandomBases)
    for name, bases in wanted.memory.subspaces.items():  # type: ignore[attr-defined]
        other = found.memory.subspaces[name]
        assert torch.equal(other.importance, bases.importance)
        assert other.nbytes == bases.nbytes
        assert any(
            not torch.equal(value, bases.state_dict()[key])
            for key, value in other.state_dict().items()
            if key in ("basis", "tokens")
        )


def test_accuracy_and_loss_are_those_of_the_token_after_each_prompt() -> None:
    model, answers = language_model().eval(), torch.tensor([32, 33])
    prompts = [([1, 2, 3, 4], 0), ([5, 6], 1), ([7], 0)]
    task = PromptTask("any", answers, prompts, prompts, prompts)
    with torch.no_grad():
        logits = [model(torch.tensor([tokens])).logits[0, -1] for tokens, _ in prompts]
    accuracy, loss = measure_answers(model, task, prompts)
    right = [int(row[answers].argmax()) == answer for row, (_, answer) in zip(logits, prompts, strict=True)]
    losses = [-row.log_softmax(0)[answers[answer]] for row, (_, answer) in zip(logits, prompts, strict=True)]
    assert accuracy == pytest.approx(sum(right) / 3)
    assert loss == pytest.approx(float(sum(losses)) / 3, rel=1e-5)


def test_padding_has_no_part_in_the_loss() -> None:
    model = language_model()
    long, short = [1, 2, 3, 4, 5], [6, 7]
    together = measure_loss(model, [pad_texts([long, short])])
    apart = [measure_loss(model, [pad_texts([text])]) for text in (long, short)]
    assert together == pytest.approx((4 * apart[0] + 1 * apart[1]) / 5, rel=1e-5)


def test_prompts_are_a_text_a_question_and_an_answer(tmp_path: Path) -> None:
    labels = {"joy": "I am glad", "fear": "it is dark"}
    rows = [[text, label] for label, text in labels.items()] * 300
    task = {"name": "emotion", "labels": [*labels], "train": rows, "test": rows[:4]}
    (tmp_path / "fivetext.json").write_text(json.dumps({"tasks": [task]}), encoding="utf-8")
    vocabulary = ["I", "am", "glad", "it", "is", "dark", "The", "emotion", "joy", "fear"]

    def tokenizer(text: str) -> dict[str, Any]:
        return {"input_ids": [vocabulary.index(word) for word in text.split()]}

    found = read_task("emotion", tmp_path, tokenizer, seed=0)
    assert found.answers.tolist() == [9, 8]
    assert (len(found.train), len(found.validation), len(found.test)) == (100, 500, 4)
    assert ([0, 1, 2, 6, 7, 4], 1) in found.test
    assert ([3, 4, 5, 6, 7, 4], 0) in found.test
    batch = next(found.sample_batches(1, 100, seed=0))
    assert {tuple(row) for row in batch["input_ids"].tolist()} == {(0, 1, 2, 6, 7, 4, 8), (3, 4, 5, 6, 7, 4, 9)}


def test_a_run_that_exists_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sgp", "--seed", "3", "--alpha", "5", "--out", str(tmp_path)]
    path = tmp_path / f"{name_run(arguments)}.json"
    assert path.name == "sgp_lr0.0001_alpha5.0_seed3.json"
    path.write_text("{}", encoding="utf-8")
    main(arguments)
    assert "already exists" in capsys.readouterr().out


def run_of(method: str, seed: int, accuracy: float, rise: float, **options: str) -> dict[str, Any]:
    defaults = {"lr": "0.0001", "threshold": "0.95", "alpha": "10.0", "share": "0.1", "strength": "10.0", "steps": "20"}
    return {
        "method": method,
        "options": defaults | options | {"seed": str(seed)},
        "settings": {"share": 0.1},
        "tasks": {"a": {"accuracy": accuracy, "loss": 1.0}, "b": {"accuracy": accuracy, "loss": 2.0}},
        "rise": {"self-sampled": rise, "bible": 0.25},
        "bytes": 2_000_000,
        "step_seconds": 0.5,
    }


def test_a_table_has_means_over_seeds() -> None:
    table = make_table([run_of("sgp", 0, 0.5, 0.1), run_of("sgp", 1, 0.6, 0.3), run_of("frozen", 0, 0.4, 0.0)])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows[0][1:6] == ["2", "55.0 ± 7.1", "1.500 ± 0.000", "+0.200 ± 0.141", "+0.250 ± 0.000"]
    assert rows[1][1:3] == ["1", "40.0"]


def test_the_best_trial_of_a_method_is_run_with_all_seeds_and_so_is_its_control() -> None:
    trials = [
        run_of("sgp", 0, 0.5, 0.0, lr="0.0002"),
        run_of("sgp", 0, 0.6, 0.3, lr="0.0004"),
        run_of("ewc", 0, 0.6, 0.3),
    ]
    commands = list_commands(trials, "there")
    assert len(commands) == 9
    assert sum(" sgp --lr 0.0002 " in command for command in commands) == 3
    assert sum(" random-bases --lr 0.0002 " in command for command in commands) == 3
    assert all(command.split(" --out there --seed ")[1] in "012" for command in commands)
    for command in commands:
        name_run(command.split()[3:])  # the benchmark understands it
