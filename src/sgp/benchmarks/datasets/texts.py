"""Text data sets: CLINC150 in its published format, and fivetext, one file of five tasks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from sgp.benchmarks.datasets.images import DamagedData, MissingData

# A text and the name of its class.
LabeledText = tuple[str, str]

CLINC150 = "clinc150"
FIVETEXT = "fivetext"
SENTENCES = {"train": 100, "val": 20, "test": 30}  # of each intent
DOMAINS, INTENTS = 10, 15


class TextTask(NamedTuple):
    """One task of fivetext: its name, the names of its classes, and its texts."""

    name: str
    labels: list[str]
    train: list[LabeledText]
    test: list[LabeledText]


def read_clinc150(directory: Path) -> tuple[dict[str, list[str]], dict[str, list[LabeledText]]]:
    """Read CLINC150: the intents of each domain, and the sentences of each part."""
    folder = directory / "clinc150"
    sentences, domains = _read_json(folder / "data_full.json", CLINC150), _read_json(folder / "domains.json", CLINC150)
    try:
        parts = {part: _to_texts(sentences[part]) for part in SENTENCES}
        intents = {str(domain): [str(intent) for intent in members] for domain, members in domains.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedData(f"{folder} is not in the format of CLINC150 ({error}): download it again") from error
    if len(intents) != DOMAINS or any(len(members) != INTENTS for members in intents.values()):
        raise DamagedData(f"{folder / 'domains.json'} does not have {DOMAINS} domains of {INTENTS} intents each")
    for part, each in SENTENCES.items():
        counts = Counter(label for _, label in parts[part])
        for intent in (intent for members in intents.values() for intent in members):
            if counts[intent] != each:
                raise DamagedData(
                    f"{folder / 'data_full.json'}: {part} has {counts[intent]} sentences of {intent!r} and should have "
                    f"{each}: download it again"
                )
    return intents, parts


def read_fivetext(directory: Path) -> list[TextTask]:
    """Read the five tasks of fivetext."""
    path = directory / "fivetext.json"
    content = _read_json(path, FIVETEXT)
    try:
        tasks = [
            TextTask(
                str(task["name"]), list(map(str, task["labels"])), _to_texts(task["train"]), _to_texts(task["test"])
            )
            for task in content["tasks"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedData(f"{path} is not in the format of fivetext ({error}): download it again") from error
    for task in tasks:
        unknown = {label for _, label in task.train + task.test} - set(task.labels)
        if unknown or not task.train or not task.test:
            raise DamagedData(f"{path}: task {task.name!r} is incomplete: download it again")
    return tasks


def describe_clinc150(directory: Path) -> str:
    """Describe the sentences that were found."""
    intents, parts = read_clinc150(directory)
    return f"{len(parts['train'])} training and {len(parts['test'])} test sentences of {INTENTS * len(intents)} intents"


def describe_fivetext(directory: Path) -> str:
    """Describe the texts that were found."""
    tasks = read_fivetext(directory)
    train, test = sum(len(task.train) for task in tasks), sum(len(task.test) for task in tasks)
    return f"{train} training and {test} test texts of {len(tasks)} tasks"


def _to_texts(rows: Any) -> list[LabeledText]:
    return [(str(text), str(label)) for text, label in rows]


def _read_json(path: Path, dataset: str) -> Any:
    if not path.is_file():
        raise MissingData(f"there is no {path}, a file of {dataset}: `sgp data get {dataset}` says where it comes from")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedData(f"{path} is truncated or damaged ({error}): download it again") from error
