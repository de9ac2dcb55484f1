"""Streams of texts: CLINC150 by domain, and five tasks of different kinds. Each task has a head of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.datasets import texts
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.datasets.texts import LabeledText
from sgp.benchmarks.settings import CLINC150, FiveText
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.networks.minilm import tokenize


def load_clinc150(settings: CLINC150, data: Path | None, seed: int) -> Stream:
    """Load the domains, in the order of the file."""
    intents, parts = texts.read_clinc150(find_data_folder(data, texts.CLINC150))
    names = list(intents)[: settings.tasks]
    limits = texts.SENTENCES | {"train": settings.sentences}

    def make(index: int) -> Task:
        labels = intents[names[index]]
        train, validation, test = (
            _encode(_take_first(parts[part], dict.fromkeys(labels, limit))[0], labels, settings.length)
            for part, limit in limits.items()
        )
        return Task(names[index], index, train, validation, test)

    return Stream(names, (settings.length,), [len(intents[name]) for name in names], make)


def load_fivetext(settings: FiveText, data: Path | None, seed: int) -> Stream:
    """Load the tasks, in the order of the file."""
    tasks = texts.read_fivetext(find_data_folder(data, texts.FIVETEXT))[: settings.tasks]

    def make(index: int) -> Task:
        task = tasks[index]
        order = np.random.RandomState(seed).permutation(len(task.train))
        chosen = _balance([task.train[row] for row in order], task.labels, settings.texts)
        held, kept = _hold_out(chosen, settings.validation)
        train, validation, test = (_encode(part, task.labels, settings.length) for part in (kept, held, task.test))
        return Task(task.name, index, train, validation, test)

    return Stream([task.name for task in tasks], (settings.length,), [len(task.labels) for task in tasks], make)


def _encode(labeled: Sequence[LabeledText], labels: list[str], length: int) -> Examples:
    # Texts are short enough to be stored as token ids.
    tokens = tokenize([text for text, _ in labeled], length)
    return Examples(tokens, torch.tensor([labels.index(label) for _, label in labeled], dtype=torch.int64))


def _take_first(
    labeled: Sequence[LabeledText], limits: Mapping[str, int]
) -> tuple[list[LabeledText], list[LabeledText]]:
    """Split texts into the first ones of each label, up to the label's limit, and the others, in the order given."""
    left = Counter(limits)
    first: list[LabeledText] = []
    others: list[LabeledText] = []
    for text, label in labeled:
        (first if left[label] > 0 else others).append((text, label))
        left[label] -= 1
    return first, others


def _balance(labeled: list[LabeledText], labels: list[str], limit: int | None) -> list[LabeledText]:
    """Return at most `limit` texts, spread as evenly over the labels as possible, at least two of each."""
    if limit is None:
        return labeled
    first, _ = _take_first(labeled, dict.fromkeys(labels, max(2, -(-limit // len(labels)))))
    return first[: max(limit, 2 * len(labels))]


def _hold_out(labeled: Sequence[LabeledText], share: float) -> tuple[list[LabeledText], list[LabeledText]]:
    """Split off a share of each label's texts, at least one of each if the share is not 0."""
    counts = Counter(label for _, label in labeled)
    return _take_first(
        labeled, {label: min(n - 1, max(1, round(share * n))) if share else 0 for label, n in counts.items()}
    )
