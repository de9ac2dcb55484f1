"""Classification of short texts as prompts with answers of one token, and general English to measure forgetting on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgp.benchmarks.datasets import english, texts

# Tokens of a text; longer ones are cut. The question and the answer come after it.
TEXT_LENGTH = 20
QUESTIONS = {
    "dbpedia": "\nThis is about a",
    "emotion": "\nThe emotion is",
    "clinc150": "\nThe topic is",
    "polarity": "\nThe review is",
    "subjectivity": "\nThe sentence is",
}
# The four that are learned one after another.
TASKS = ("emotion", "dbpedia", "clinc150", "polarity")
# Answers of one token, by label; other labels are answers as they stand.
ANSWERS = {
    "Album": "album",
    "Animal": "animal",
    "Artist": "artist",
    "Athlete": "athlete",
    "Building": "building",
    "Company": "company",
    "Educational Institution": "school",
    "Film": "film",
    "Mean of Transportation": "vehicle",
    "Natural Place": "mountain",
    "Office Holder": "politician",
    "Plant": "plant",
    "Village": "village",
    "Written Work": "book",
    "credit_cards": "credit",
    "kitchen_and_dining": "food",
    "auto_and_commute": "car",
    "small_talk": "chat",
}
Labelled = tuple[str, str]
Prompt = tuple[list[int], int]  # tokens without the answer, and the index of the answer


@dataclass(frozen=True)
class PromptTask:
    """One task as prompts.

    Attributes:
        name: Name of the task.
        answers: Token of each answer. [classes]
        train: Prompts to learn from.
        validation: Prompts to choose settings on.
        test: Prompts for the results.
    """

    name: str
    answers: Tensor
    train: list[Prompt]
    validation: list[Prompt]
    test: list[Prompt]

    def sample_batches(self, steps: int, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Yield training batches of prompts with their answers, drawn without replacement while there are enough."""
        order: list[int] = []
        generator = random.Random(seed)
        for _ in range(steps):
            if len(order) < size:
                order = generator.sample(range(len(self.train)), len(self.train))
            chosen = [self.train[order.pop()] for _ in range(size)]
            yield pad_texts([[*tokens, int(self.answers[answer])] for tokens, answer in chosen])


def read_task(name: str, data: Path, tokenizer: Any, seed: int) -> PromptTask:
    """Return a task. Its texts are shuffled by the seed, and 500 of the training texts are held out for validation."""
    train, test = _read_clinc150(data) if name == "clinc150" else _read_fivetext(data, name)
    labels = sorted({label for _, label in train})
    answers = [tokenizer(f" {ANSWERS.get(label, label)}")["input_ids"] for label in labels]
    if any(len(answer) != 1 for answer in answers) or len({answer[0] for answer in answers}) < len(answers):
        raise ValueError(f"task {name!r}: answers must be single and different tokens, got {answers} for {labels}")
    question = tokenizer(QUESTIONS[name])["input_ids"]

    def make_prompts(labelled: list[Labelled], seed: int) -> list[Prompt]:
        shuffled = random.Random(seed).sample(labelled, len(labelled))
        return [
            (tokenizer(text)["input_ids"][:TEXT_LENGTH] + question, labels.index(label)) for text, label in shuffled
        ]

    # The split is the same in all runs, the order of the training texts is not.
    rest, held_out = train[500:], train[:500]
    return PromptTask(
        name, torch.tensor(answers)[:, 0], make_prompts(rest, seed), make_prompts(held_out, 0), make_prompts(test, 0)
    )


def read_english(
    data: Path, tokenizer: Any, passages: int = 24, length: int = 48
) -> dict[str, list[dict[str, Tensor]]]:
    """Return batches of passages of general English by book, evenly spaced over it."""
    found = {}
    for name, text in english.read(data).items():
        words = text.split()
        starts = [index * len(words) // passages for index in range(passages)]
        parts = [" ".join(words[start : start + length]) for start in starts]
        tokens = [ids[:length] for ids in tokenizer(parts)["input_ids"]]
        found[name] = split_batches(pad_texts(tokens))
    return found


def pad_texts(texts: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return texts as one batch [n, longest], padded on the right."""
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return {"input_ids": tokens, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def split_batches(batch: dict[str, Tensor], size: int = 8) -> list[dict[str, Tensor]]:
    """Return a batch as several smaller ones."""
    parts = {name: torch.split(tensor, size) for name, tensor in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def _read_fivetext(data: Path, name: str) -> tuple[list[Labelled], list[Labelled]]:
    task = next(task for task in texts.read_fivetext(data) if task.name == name)
    shuffled: list[Labelled] = random.Random(0).sample(task.train, len(task.train))
    return shuffled, task.test


def _read_clinc150(data: Path) -> tuple[list[Labelled], list[Labelled]]:
    """Return sentences with their domain; the answers are the ten domains."""
    intents, parts = texts.read_clinc150(data)
    domain = {intent: name for name, members in intents.items() for intent in members}
    train, test = ([(text, domain[label]) for text, label in parts[part]] for part in ("train", "test"))
    return random.Random(0).sample(train, len(train)), test
