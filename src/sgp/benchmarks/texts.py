"""Streams of texts: CLINC150 by domain, and five tasks of different kinds. A head of its own for each task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.datasets import texts
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.datasets.texts import Labelled
from sgp.benchmarks.settings.texts import CLINC150, FiveText
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.networks.minilm import tokens_of


def clinc150(settings: CLINC150, data: Path | None, seed: int) -> Stream:
    """The domains, in the order of the file."""
    intents, parts = texts.read_clinc150(find(data, texts.CLINC150))
    names = list(intents)[: settings.tasks]

    def make(index: int) -> Task:
        labels = intents[names[index]]
        each = {"train": settings.sentences, "val": None, "test": None}
        train, validation, test = (
            _examples(_first(parts[part], labels, most), labels, settings.length) for part, most in each.items()
        )
        return Task(names[index], index, train, validation, test)

    return Stream(names, (settings.length,), [len(intents[name]) for name in names], make)


def fivetext(settings: FiveText, data: Path | None, seed: int) -> Stream:
    """The tasks, in the order of the file."""
    tasks = texts.read_fivetext(find(data, texts.FIVETEXT))[: settings.tasks]

    def make(index: int) -> Task:
        task = tasks[index]
        labels: list[str] = task["labels"]
        order = np.random.RandomState(seed).permutation(len(task["train"]))
        shuffled = [task["train"][row] for row in order]
        chosen = _balanced(shuffled, labels, settings.texts)
        held, kept = _held_out(chosen, labels, settings.validation)
        train, validation, test = (_examples(each, labels, settings.length) for each in (kept, held, task["test"]))
        return Task(task["name"], index, train, validation, test)

    return Stream([task["name"] for task in tasks], (settings.length,), [len(task["labels"]) for task in tasks], make)


def _examples(labelled: Sequence[Labelled], labels: list[str], length: int) -> Examples:
    number = {label: index for index, label in enumerate(labels)}
    # Texts are short enough to be kept as token ids.
    return Examples(
        tokens_of([text for text, _ in labelled], length),
        torch.tensor([number[label] for _, label in labelled], dtype=torch.int64),
    )


def _first(labelled: Sequence[Labelled], labels: list[str], most: int | None) -> list[Labelled]:
    """Those of some labels, at most so many of each, in the order of the file."""
    left = dict.fromkeys(labels, len(labelled) if most is None else most)
    chosen = []
    for text, label in labelled:
        if left.get(label, 0) > 0:
            left[label] -= 1
            chosen.append((text, label))
    return chosen


def _balanced(labelled: Sequence[Labelled], labels: list[str], most: int | None) -> list[Labelled]:
    """At most so many in all, as even over the labels as they are, at least two of each."""
    if most is None:
        return list(labelled)
    return _first(labelled, labels, max(2, -(-most // len(labels))))[: max(most, 2 * len(labels))]


def _held_out(labelled: Sequence[Labelled], labels: list[str], share: float) -> tuple[list[Labelled], list[Labelled]]:
    """A share of each label's texts, at least one where anything is held out; and the rest."""
    counts = {label: sum(1 for _, own in labelled if own == label) for label in labels}
    left = {label: min(count - 1, max(1, round(share * count))) if share else 0 for label, count in counts.items()}
    held: list[Labelled] = []
    kept: list[Labelled] = []
    for text, label in labelled:
        (held if left[label] > 0 else kept).append((text, label))
        left[label] -= 1
    return held, kept
