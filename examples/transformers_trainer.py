"""Protect a model that the Trainer of transformers trains: synthetic texts of three domains, one domain after another.

python examples/transformers_trainer.py    # half a minute on a CPU; needs transformers and accelerate
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import sgp
from sgp.integrations.transformers import GradientMemoryCallback

TASKS, WORDS, LENGTH = 3, 12, 6


def load_task(task: int, test: bool) -> list[dict[str, torch.Tensor]]:
    """Return sentences of words that only this task uses; the class is which half of the words occurs more often."""
    generator = torch.Generator().manual_seed(2 * task + test)
    sentences = torch.randint(WORDS, (1000, LENGTH + 1), generator=generator)
    classes = ((sentences < WORDS // 2).sum(1) > LENGTH // 2).long()
    return [
        {"input_ids": 1 + WORDS * task + words, "labels": label}
        for words, label in zip(sentences, classes, strict=True)
    ]


def compute_accuracy(model: BertForSequenceClassification, task: int) -> float:
    data = load_task(task, test=True)
    with torch.no_grad():
        logits = model.eval()(torch.stack([each["input_ids"] for each in data])).logits
    return 100 * (logits.argmax(1) == torch.stack([each["labels"] for each in data])).float().mean().item()


def learn_tasks(protect: bool) -> tuple[float, float]:
    """Return ACC and BWT in percent."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1 + WORDS * TASKS,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH + 1,
    )
    model = BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)  # as those of a pretrained model often are
    callbacks = [GradientMemoryCallback(sgp.GradientMemory(model, threshold=0.99, alpha=10))] if protect else []
    learned = []
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=6,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        for task in range(TASKS):
            Trainer(model, settings, train_dataset=load_task(task, test=False), callbacks=callbacks).train()
            learned.append(compute_accuracy(model, task))
    final = [compute_accuracy(model, task) for task in range(TASKS)]
    return sum(final) / TASKS, (sum(final) - sum(learned)) / (TASKS - 1)


if __name__ == "__main__":
    for name, protect in {"without the memory": False, "with the memory": True}.items():
        print("{:<18}  ACC {:5.1f}  BWT {:5.1f}".format(name, *learn_tasks(protect)))
