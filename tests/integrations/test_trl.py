"""The callback for transformers in TRL's SFTTrainer, on a tiny Llama with random weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp import storage

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="of the extra 'trl'")
datasets = pytest.importorskip("datasets", reason="TRL needs it")
from sgp.integrations.transformers import GradientMemoryCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*can hardly learn"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]

WORDS = [
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "likes",
    "old",
    "new",
    "red",
    "blue",
    "good",
]
# Two tasks of words that differ but for one; sentences of different lengths, so that batches are padded.
TEXTS = [
    ["the cat sees the cat", "the dog sees", "the dog sees the cat sees the dog", "the cat"] * 2,
    ["a old likes a new", "a red likes a blue likes", "a new likes the red", "a blue"] * 2,
]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
            bos_token_id=2,
            eos_token_id=3,
            pad_token_id=0,
        )
    )


def make_trainer(model: Any, callbacks: list[Any], task: int, folder: Path, *, prompts: bool, **settings: Any) -> Any:
    if prompts:  # the loss is that of the completions
        rows = [text.rsplit(" ", 1) for text in TEXTS[task]]
        columns = {"prompt": [row[0] for row in rows], "completion": [" " + row[1] for row in rows]}
    else:
        columns = {"text": TEXTS[task]}
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "learning_rate": 3e-3,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            **settings,
        },
    )
    data = datasets.Dataset.from_dict(columns)
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=make_tokenizer(), callbacks=callbacks)


def compute_logits(model: Any, task: int) -> Tensor:
    batch = make_tokenizer()([f"{text} </s>" for text in TEXTS[task]], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[batch["attention_mask"].bool()]


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


@pytest.mark.parametrize(
    ("prompts", "settings", "options", "allowed"),
    [
        pytest.param(False, {}, {}, 1e-4, id="texts"),
        pytest.param(True, {"gradient_accumulation_steps": 2}, {"every": 4}, 1e-4, id="completions, every 4 steps"),
        pytest.param(False, {"bf16": True}, {}, 0.05, id="bfloat16 autocast"),
    ],
)
def test_logits_of_the_first_task_do_not_change_while_the_second_is_trained(
    prompts: bool, settings: dict[str, Any], options: dict[str, Any], allowed: float, tmp_path: Path
) -> None:
    model = make_model()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    callbacks = [GradientMemoryCallback(memory, **options)]
    make_trainer(model, callbacks, 0, tmp_path, prompts=prompts, **settings).train()
    assert memory.tasks == 1
    plain = make_model()  # TRL replaces the model's forward, and a copy would run the forward of the original
    plain.load_state_dict(model.state_dict())
    old, new = compute_logits(model, 0), compute_logits(model, 1)
    make_trainer(model, callbacks, 1, tmp_path, prompts=prompts, **settings).train()
    make_trainer(plain, [], 1, tmp_path, prompts=prompts, **settings).train()
    assert memory.tasks == 2
    assert measure_drift(compute_logits(plain, 0), old) > 0.1
    assert measure_drift(compute_logits(model, 0), old) < allowed
    assert measure_drift(compute_logits(model, 1), new) > 0.02


def test_padding_does_not_count(tmp_path: Path) -> None:
    model = make_model()
    memory = sgp.GradientMemory(model, threshold=1.0)
    make_trainer(model, [GradientMemoryCallback(memory)], 0, tmp_path, prompts=False, max_steps=1).train()
    importance = memory.subspaces["model.embed_tokens"]
    seen = {word for text in TEXTS[0] for word in text.split()} | {"</s>"}
    assert int(importance.rank.sum()) == len(seen)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_a_training_that_is_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = []
    for resume in (False, True):
        model = make_model()
        memory = sgp.GradientMemory(model, threshold=0.9, alpha=2.0)
        settings = {"save_strategy": "steps", "save_steps": 4}
        trainer = make_trainer(model, [GradientMemoryCallback(memory)], 0, tmp_path, prompts=False, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resume else None)
        found.append((model, storage.digest(memory.state_dict())))
    assert_same_weights(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
