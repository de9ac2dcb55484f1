"""Text data sets: CLINC150 in its published format, and fivetext, one file of five tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgp.benchmarks.datasets.images import DamagedData, MissingData

# A text and the name of its class.
Labelled = tuple[str, str]

CLINC150 = "clinc150"
FIVETEXT = "fivetext"
SENTENCES = {"train": 100, "val": 20, "test": 30}  # of each intent
DOMAINS, INTENTS = 10, 15


def read_clinc150(directory: Path) -> tuple[dict[str, list[str]], dict[str, list[Labelled]]]:
    """Intents by domain, and the sentences of each part."""
    where = directory / "clinc150"
    sentences, domains = _json(where / "data_full.json", CLINC150), _json(where / "domains.json", CLINC150)
    try:
        parts = {part: [(str(text), str(label)) for text, label in sentences[part]] for part in SENTENCES}
        intents = {str(domain): [str(intent) for intent in members] for domain, members in domains.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedData(f"{where}: not in the format of CLINC150 ({error})") from error
    if len(intents) != DOMAINS or any(len(members) != INTENTS for members in intents.values()):
        raise DamagedData(f"{where / 'domains.json'} does not have {DOMAINS} domains of {INTENTS} intents each")
    for part, each in SENTENCES.items():
        found = [label for _, label in parts[part]]
        for intent in (intent for members in intents.values() for intent in members):
            if found.count(intent) != each:
                raise DamagedData(
                    f"{where / 'data_full.json'}: {part} has {found.count(intent)} sentences of {intent!r} and should "
                    f"have {each}: get it again"
                )
    return intents, parts


def read_fivetext(directory: Path) -> list[dict[str, Any]]:
    """Five tasks, each with name, labels, and train and test texts."""
    path = directory / "fivetext.json"
    tasks = _json(path, FIVETEXT)
    try:
        found = [
            {
                "name": str(task["name"]),
                "labels": [str(label) for label in task["labels"]],
                **{part: [(str(text), str(label)) for text, label in task[part]] for part in ("train", "test")},
            }
            for task in tasks["tasks"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedData(f"{path}: not in the format of fivetext ({error})") from error
    for task in found:
        strange = {label for part in ("train", "test") for _, label in task[part]} - set(task["labels"])
        if strange or not task["train"] or not task["test"]:
            raise DamagedData(f"{path}: task {task['name']!r} is not whole; get the file again")
    return found


def describe_clinc150(directory: Path) -> str:
    """What is there, in a sentence."""
    intents, parts = read_clinc150(directory)
    return f"{len(parts['train'])} training and {len(parts['test'])} test sentences of {INTENTS * len(intents)} intents"


def describe_fivetext(directory: Path) -> str:
    """What is there, in a sentence."""
    tasks = read_fivetext(directory)
    train, test = (sum(len(task[part]) for task in tasks) for part in ("train", "test"))
    return f"{train} training and {test} test texts of {len(tasks)} tasks"


def _json(path: Path, dataset: str) -> Any:
    if not path.is_file():
        raise MissingData(
            f"there is no {path}, which {dataset} is read from: `sgp data get {dataset}` says what goes there"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedData(f"{path} is truncated or damaged ({error}); get it again") from error
