"""Files of a memory: resuming from them, and damaged ones."""

import copy
import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data.make_memory import inputs, memory_of, network
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sgp import GradientMemory, storage
from sgp.projection.modes import Mode

OLD = Path(__file__).parent / "data" / "memory-format-1.safetensors"


class Mixed(nn.Module):
    """A convolution, a norm layer, and linear layers wider and narrower than the batch, for every projection mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(32, 64)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).relu().flatten(1)
        return self.out(self.wide(hidden).relu())


def make_task(seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(3, 3, generator=generator)
    x = torch.einsum("nct,cd->ndt", torch.randn(6, 16, 3, 6, generator=generator).flatten(0, 1), mixing)
    y = torch.randint(3, (96,), generator=generator)
    return list(zip(x.split(16), y.split(16), strict=True))


def train(model: nn.Module, optimizer: Optimizer, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def make_model() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def make_memory(model: nn.Module) -> GradientMemory:
    return GradientMemory(model, threshold=lambda i: 0.9 + 0.02 * i, alpha=5)


def make_learned_memory(rest: str = "freeze") -> GradientMemory:
    memory = GradientMemory(make_model(), threshold=0.9, alpha=5, rest=rest)  # type: ignore[arg-type]
    memory.update(make_task(0))
    return memory


def list_leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return every tensor and plain value of a state dict by its path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in list_leaves(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in list_leaves(item, f"{path}/{i}").items()}
    return {path: value}


def assert_same(a: Any, b: Any) -> None:
    """Assert that state dicts are equal to the bit."""
    a, b = list_leaves(a), list_leaves(b)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, Tensor):
            assert value.dtype == b[key].dtype, key
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


# Every mode; "input" is requested, since "auto" does not choose it for layers as small as these.
STEPS: dict[str, tuple[Callable[[nn.Module], Optimizer], Mode]] = {
    "SGD": (lambda model: SGD(model.parameters(), lr=0.05), "auto"),
    "SGD with momentum": (lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), "auto"),
    "SGD by inputs": (lambda model: SGD(model.parameters(), lr=0.05), "input"),
    "SGD with momentum by inputs": (lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), "input"),
    "SGD with weight decay": (lambda model: SGD(model.parameters(), lr=0.05, weight_decay=1e-2), "auto"),
    "Adam": (lambda model: Adam(model.parameters(), lr=1e-2), "auto"),
}


@pytest.mark.parametrize("order", ["attach last", "attach first"])
@pytest.mark.parametrize(("new_optimizer", "mode"), STEPS.values(), ids=STEPS.keys())
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    new_optimizer: Callable[[nn.Module], Optimizer], mode: Mode, order: str, tmp_path: Path
) -> None:
    model = make_model()
    memory = make_memory(model)
    optimizer = new_optimizer(model)
    hook = memory.attach(optimizer, mode=mode)
    train(model, optimizer, make_task(0))
    memory.update(make_task(0))
    train(model, optimizer, make_task(1)[:3])
    assert ("input" in hook.modes.values()) == (mode == "input")

    memory.save(tmp_path / "memory.safetensors")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "rest.pt")
    torch.manual_seed(99)
    resumed = Mixed()
    resumed_memory = make_memory(resumed)
    resumed_optimizer = new_optimizer(resumed)
    if order == "attach first":
        resumed_memory.attach(resumed_optimizer, mode=mode)
    rest = torch.load(tmp_path / "rest.pt")
    resumed.load_state_dict(rest["model"])
    resumed_optimizer.load_state_dict(rest["optimizer"])
    resumed_memory.load(tmp_path / "memory.safetensors")
    if order == "attach last":
        resumed_memory.attach(resumed_optimizer, mode=mode)
    assert_same(resumed_memory.state_dict(), memory.state_dict())

    for m, o, kept in ((model, optimizer, memory), (resumed, resumed_optimizer, resumed_memory)):
        train(m, o, make_task(1)[3:])
        kept.update(make_task(1))
        train(m, o, make_task(2)[:2])
    assert_same(resumed.state_dict(), model.state_dict())
    assert_same(resumed_memory.state_dict(), memory.state_dict())
    assert_same(resumed_optimizer.state_dict()["state"], optimizer.state_dict()["state"])
    # The comparison above would also hold if no step was projected.
    assert any((s.importance == 1).any() for s in memory.subspaces.values())
    assert resumed_memory.tasks == 2


def test_a_resumed_run_with_16_bit_weights_equals_an_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    def new() -> tuple[nn.Module, GradientMemory, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).bfloat16()
        return model, GradientMemory(model, threshold=0.9, alpha=5), AdamW(model.parameters(), lr=1e-3)

    def steps(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
        for seed in seeds:
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model, memory, optimizer = new()
    with pytest.warns(UserWarning, match="16-bit"):
        hook = memory.attach(optimizer)
    steps(model, optimizer, range(3))
    memory.update([torch.randn(20, 8).bfloat16()])
    steps(model, optimizer, range(3, 8))
    memory.save(tmp_path / "memory")
    resumed, resumed_memory, resumed_optimizer = new()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_memory.load(tmp_path / "memory")
    assert_same(resumed_memory.state_dict(), memory.state_dict())
    with pytest.warns(UserWarning, match="16-bit"):
        resumed_memory.attach(resumed_optimizer).load_state_dict(copy.deepcopy(hook.state_dict()))
    assert hook.state_dict()
    steps(model, optimizer, range(8, 14))
    steps(resumed, resumed_optimizer, range(8, 14))
    assert_same(resumed.state_dict(), model.state_dict())


def test_shared_subspaces_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    def attention() -> GradientMemory:
        torch.manual_seed(0)
        return GradientMemory(nn.MultiheadAttention(8, 2, batch_first=True), threshold=0.7)

    def run(memory: GradientMemory) -> Callable[[Tensor], Any]:
        return lambda x: memory.model(x, x, x)

    batch = torch.randn(30, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 0.1, 8)
    memory, loaded = attention(), attention()
    memory.update([batch], forward=run(memory))
    memory.save(tmp_path / "memory")
    loaded.load(tmp_path / "memory")
    for m in (memory, loaded):
        query, key, value, attended = m.subspaces.values()
        assert query is key is value is not attended
    with safe_open(tmp_path / "memory", framework="pt") as file:
        bases = [key for key in file.keys() if file.get_tensor(key).dim() == 3]  # noqa: SIM118
    assert len(bases) == 2
    # They are still shared after the next update, which gives the same bases.
    for m in (memory, loaded):
        m.update([batch.roll(1, dims=2)], forward=run(m), allow_unattached=True)
    assert_same(loaded.state_dict(), memory.state_dict())
    assert len(loaded.state_dict()["subspaces"]) == 2


def header_size(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda file: b"",
    "seven bytes": lambda file: file[:7],
    "half the header": lambda file: file[: header_size(file) // 2],
    "the header alone": lambda file: file[: header_size(file)],
    "half": lambda file: file[: len(file) // 2],
    "all but one byte": lambda file: file[:-1],
    "one byte too many": lambda file: file + b"\0",
    "text": lambda file: b"this is no memory\n" * 20,
    "pickle": lambda file: pickle.dumps({"format": 1, "subspaces": []}),
    "safetensors of something else": lambda file: save({"weight": torch.zeros(3)}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused_by_its_path_and_changes_nothing(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    memory = make_learned_memory()
    before = copy.deepcopy(memory.state_dict())
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="truncated, damaged or not a saved memory") as error:
        memory.load(path)
    assert str(path) in str(error.value)
    assert_same(memory.state_dict(), before)


def test_a_single_flipped_bit_is_detected_anywhere(tmp_path: Path) -> None:
    whole = OLD.read_bytes()
    path = tmp_path / "flipped"
    # Every seventh byte, with each of the eight bits in turn: in lengths, names, numbers and tensors.
    for count, position in enumerate(range(0, len(whole), 7)):
        flipped = bytes([whole[position] ^ (1 << count % 8)])
        path.write_bytes(whole[:position] + flipped + whole[position + 1 :])
        with pytest.raises(ValueError, match=r"damaged|has format") as error:
            storage.read(path)
        assert str(path) in str(error.value)


def test_changed_numbers_in_a_file_are_detected(tmp_path: Path) -> None:
    whole = OLD.read_bytes()
    for old, new in ((b'\\"tasks\\": 2', b'\\"tasks\\": 9'), (b'\\"out.weight\\"', b'\\"owt.weight\\"')):
        assert old in whole
        (tmp_path / "changed").write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="does not match its digest"):
            storage.read(tmp_path / "changed")


def test_a_newer_format_is_refused_and_the_error_names_the_supported_one(tmp_path: Path) -> None:
    memory = make_learned_memory()
    before = copy.deepcopy(memory.state_dict())
    newer = tmp_path / "newer"
    storage.write(newer, {"format": 2, "contents": {"of": torch.ones(2), "another": "shape"}})
    with pytest.raises(ValueError, match="has format 2; this version of sgp reads formats up to 1") as error:
        memory.load(newer)
    assert str(newer) in str(error.value)
    assert_same(memory.state_dict(), before)


@pytest.mark.parametrize("missing", ["nowhere.safetensors", "no_folder/memory", "."])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    memory = make_learned_memory()
    before = copy.deepcopy(memory.state_dict())
    with pytest.raises(FileNotFoundError, match="no saved memory at") as error:
        memory.load(tmp_path / missing)
    assert str(tmp_path / missing) in str(error.value)
    assert_same(memory.state_dict(), before)


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make_learned_memory()
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    old = path.read_bytes()
    memory.update(make_task(1))

    def fail(*args: object) -> None:
        assert len(list(tmp_path.iterdir())) == 2, "the new file is not written beside the old one"
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="no space left"):
            memory.save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    memory.save(path)
    assert path.read_bytes() != old
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_file_has_the_default_permissions_of_new_files(tmp_path: Path) -> None:
    make_learned_memory().save(tmp_path / "memory")
    (tmp_path / "plain").touch()
    assert (tmp_path / "memory").stat().st_mode == (tmp_path / "plain").stat().st_mode


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "settings": lambda state: state["settings"].update(numerics=None),
    "tasks": lambda state: state.update(tasks=-1),
    "subspaces": lambda state: state["subspaces"][0].pop("importance"),
    "statistics": lambda state: state["statistics"].update(x=1),
    "fingerprints": lambda state: state["fingerprints"].update(x="no_type 3"),
    "trained": lambda state: state.update(trained=[None]),
    "proved": lambda state: state.update(proved="yes"),
}


@pytest.mark.parametrize("entry", FORGERIES)
def test_an_entry_of_another_form_is_named_although_the_digest_fits(entry: str, tmp_path: Path) -> None:
    memory = make_learned_memory()
    path = tmp_path / "memory"
    state = copy.deepcopy(memory.state_dict())
    FORGERIES[entry](state)
    storage.write(path, state)
    before = copy.deepcopy(memory.state_dict())
    for load in (memory.load, lambda path: GradientMemory.from_file(memory.model, path)):
        with pytest.raises(ValueError, match=f"not the state of a memory of this version: its {entry} are damaged"):
            load(path)
    assert_same(memory.state_dict(), before)


def test_a_tree_that_names_a_tensor_the_file_lacks_is_damaged(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"format": 1, "state": {storage.TENSOR: "0"}}
    header = {"sgp": json.dumps({"tree": tree, "digest": storage._digest(tree, {})})}
    (tmp_path / "file").write_bytes(save({}, metadata=header))
    with pytest.raises(ValueError, match="truncated, damaged or not a saved memory"):
        storage.read(tmp_path / "file")


def test_a_file_with_another_content_than_expected_is_damaged(tmp_path: Path) -> None:
    state = {"format": 1, "values": torch.ones(2)}
    storage.write(tmp_path / "file", state)
    assert storage.read(tmp_path / "file", digest=storage.digest(state)[:32])["format"] == 1
    with pytest.raises(ValueError, match="does not match its digest"):
        storage.read(tmp_path / "file", digest="0" * 32)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which knows no path

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device") as error:
        make_learned_memory().save(tmp_path / "memory")
    assert error.value.filename == str(tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_the_file_is_executable(tmp_path: Path) -> None:
    make_learned_memory().save(tmp_path / "memory")
    with safe_open(tmp_path / "memory", framework="pt") as file:
        contents = json.loads(file.metadata()["sgp"])
    assert set(contents) == {"tree", "digest"}
    assert contents["tree"]["format"] == storage.FORMAT


class Narrow(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(20, 64)


class Renamed(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = self.wide
        del self.wide


class Grouped(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, groups=2)


class WiderNorm(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9)


class OtherNorm(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Narrow(), r"layer 'wide': the saved memory has 1 x 33 input dimensions, the model 1 x 21"),
        (Grouped(), r"layer 'conv': the saved memory has 1 x 10 input dimensions, the model 2 x 10"),
        (Renamed(), r"layer 'wide' of the saved memory is not in the model, which has conv, out, hidden"),
        (WiderNorm(), r"'norm.running_mean': the saved memory has shape \(8,\), the model \(9,\)"),
        (OtherNorm(), r"'norm.running_mean' of the saved memory is not in the model"),
    ],
    ids=["narrower layer", "groups", "renamed layer", "wider norm layer", "other norm layer"],
)
def test_a_memory_that_does_not_fit_names_the_layer_and_both_shapes(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    make_learned_memory().save(tmp_path / "memory")
    other = GradientMemory(model, threshold=0.9, alpha=5)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path / "memory")
    assert_same(other.state_dict(), before)
    assert other.subspaces == {}


def test_a_memory_with_protected_biases_does_not_fit_a_model_without_biases(tmp_path: Path) -> None:
    make_learned_memory().save(tmp_path / "memory")
    model = make_model()
    model.conv = nn.Conv1d(3, 8, 3, bias=False)
    other = GradientMemory(model, threshold=0.9, alpha=5)
    with pytest.raises(ValueError, match=r"'conv': .* 1 x 10 .*, the model 1 x 9 \(a protected bias adds one\)"):
        other.load(tmp_path / "memory")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"threshold": 0.8}, r"threshold=0\.9 \(here 0\.8\)"),
        ({"threshold": lambda task: 0.9}, r"threshold=0\.9 \(here 'function'\)"),
        ({"alpha": 10.0}, r"alpha=5\.0 \(here 10\.0\)"),
        ({"exclude": ["out"]}, r"exclude=\[\] \(here \['out'\]\)"),
        ({"bias": "freeze"}, r"bias='protect' \(here 'freeze'\)"),
        ({"store": "int8"}, r"store='float32' \(here 'int8'\)"),
    ],
)
def test_a_memory_with_other_settings_is_refused_and_names_them(
    setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_learned_memory().save(tmp_path / "memory")
    other = GradientMemory(make_model(), **({"threshold": 0.9, "alpha": 5} | setting))
    with pytest.raises(ValueError, match=f"the saved memory has other settings: {message}"):
        other.load(tmp_path / "memory")
    assert other.tasks == 0
    loaded = GradientMemory.from_file(make_model(), tmp_path / "memory")
    assert loaded.tasks == 1
    assert_same(loaded.state_dict(), make_learned_memory().state_dict())


def test_settings_of_a_file_can_be_overridden(tmp_path: Path) -> None:
    make_learned_memory().save(tmp_path / "memory")
    loaded = GradientMemory.from_file(make_model(), tmp_path / "memory", alpha=7, threshold=0.95)
    assert (loaded.alpha, loaded.threshold, loaded.tasks) == (7.0, 0.95, 1)


def test_a_threshold_that_is_a_function_must_be_passed_again(tmp_path: Path) -> None:
    make_memory(make_model()).save(tmp_path / "memory")
    with pytest.raises(ValueError, match="a function as its threshold: pass threshold="):
        GradientMemory.from_file(make_model(), tmp_path / "memory")
    assert GradientMemory.from_file(make_model(), tmp_path / "memory", threshold=0.9).threshold == 0.9


def test_a_state_that_lacks_entries_is_refused_and_names_them() -> None:
    memory = make_learned_memory()
    state = memory.state_dict()
    del state["settings"], state["proved"]
    with pytest.raises(ValueError, match="it lacks settings, proved"):
        memory.load_state_dict(state)


def test_a_loaded_memory_detects_a_model_with_other_weights(tmp_path: Path) -> None:
    memory = make_learned_memory()
    memory.save(tmp_path / "memory")
    same = GradientMemory(copy.deepcopy(memory.model), threshold=0.9, alpha=5)
    same.load(tmp_path / "memory")
    assert same.check(make_task(0)[0]).drift == 0
    same.update(make_task(1))
    assert same.tasks == 2

    other = GradientMemory(Mixed(), threshold=0.9, alpha=5)
    other.load(tmp_path / "memory")
    with pytest.raises(RuntimeError, match="pass reference="):
        other.check(make_task(0)[0])
    with pytest.raises(RuntimeError, match="not attached"):
        other.update(make_task(1))


def test_a_memory_can_be_saved_before_the_first_update(tmp_path: Path) -> None:
    def new() -> GradientMemory:
        return make_memory(make_model())

    memory, loaded = new(), new()
    memory.save(tmp_path / "memory")
    loaded.load(tmp_path / "memory")
    optimizers = [SGD(m.model.parameters(), lr=0.1) for m in (memory, loaded)]
    for m, optimizer in zip((memory, loaded), optimizers, strict=True):
        m.attach(optimizer)
        train(m.model, optimizer, make_task(0))
        m.update(make_task(0))
    assert_same(loaded.model.state_dict(), memory.model.state_dict())
    assert_same(loaded.state_dict(), memory.state_dict())
    assert float(loaded.model.get_buffer("norm.num_batches_tracked")) == len(make_task(0))


def test_an_older_state_can_be_loaded_back_into_the_same_memory() -> None:
    memory = make_memory(make_model())
    start = memory.state_dict()
    memory.update(make_task(0))
    first = copy.deepcopy(memory.state_dict())
    memory.update(make_task(1))
    memory.load_state_dict(first)
    assert_same(memory.state_dict(), first)
    memory.load_state_dict(start)
    assert memory.tasks == 0
    assert memory.subspaces == {}
    assert memory.state_dict()["statistics"] == {}


def test_the_file_of_format_one_still_loads() -> None:
    memory = memory_of(network())
    memory.load(OLD)
    assert memory.tasks == 2
    ranks = {name: subspace.rank.tolist() for name, subspace in memory.subspaces.items()}
    assert ranks == {
        "conv": [5, 5],
        "attention:query": [3],
        "attention:key": [3],
        "attention:value": [3],
        "attention:attended": [2],
        "out": [2],
    }
    conv = memory.subspaces["conv"]
    assert conv.basis.shape == (2, 7, 5)
    expected = torch.tensor([[1, 1, 1, 0.9930, 0.9354], [1, 1, 1, 0.9920, 0.9346]])
    torch.testing.assert_close(conv.importance, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(conv.basis.mT @ conv.basis, torch.eye(5).expand(2, 5, 5), atol=1e-5, rtol=0)
    statistics = memory.state_dict()["statistics"]
    assert list(statistics) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    torch.testing.assert_close(statistics["norm.running_mean"], memory.model.get_buffer("norm.running_mean"))
    assert memory.subspaces["attention:query"] is memory.subspaces["attention:value"]
    # The model has the weights that the memory was saved with, so the memory continues without a difference.
    memory.update([inputs(2)])
    assert memory.tasks == 3


def test_a_layer_may_be_named_tensor(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("tensor", nn.Linear(4, 3))
    memory = GradientMemory(model, threshold=0.9)
    memory.update([torch.randn(2, 4)])
    memory.layers["tensor"].is_input_proven = False
    memory.save(tmp_path / "memory")
    memory.load(tmp_path / "memory")
    assert memory.layers["tensor"].is_input_proven is False


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    memory = GradientMemory(nn.Linear(4, 3), threshold=0.9)
    with pytest.raises(FileNotFoundError, match=r"missing.*: the folder does not exist"):
        memory.save(tmp_path / "missing" / "memory")
