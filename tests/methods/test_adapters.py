"""Adapters of PEFT, and the frozen network: the network's own weights stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="LoRA and OSF are PEFT's")
pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from experiments.small import run, small

from sgp.methods import METHODS
from sgp.methods.frozen import Frozen, FrozenSettings
from sgp.methods.lora import LoRASettings
from sgp.methods.osf import OSFSettings
from sgp.networks import MLP, ResNet18

SPLIT: dict[str, Any] = {"kind": "split", "epochs": 3}


def test_only_heads_of_the_frozen_network_change(tmp_path: Path) -> None:
    learner = run(tmp_path / "run", small("frozen", **SPLIT))
    first = run(tmp_path / "first", small("frozen", **SPLIT, tasks=1))
    mine, theirs = learner.network.state_dict(), first.network.state_dict()
    body = [name for name in mine if not name.startswith("heads.")]
    assert body
    assert all(torch.equal(mine[name], theirs[name]) for name in body)
    assert not torch.equal(mine["heads.1.weight"], theirs["heads.0.weight"])
    # No row falls: heads are all that is learned.
    rows = learner.accuracies
    assert all(row[0] == rows[0][0] for row in rows)


def test_a_head_of_the_frozen_network_is_the_logistic_regression_of_its_features() -> None:
    from sklearn.linear_model import LogisticRegression

    torch.manual_seed(0)
    network, settings = MLP((6, 8), (3, 3)), FrozenSettings(head_decay=0.01)
    method = METHODS["frozen"](network, settings, exclude=["heads.*"])
    assert isinstance(method, Frozen)
    inputs, labels = torch.randn(200, 6), torch.randint(0, 3, (200,))
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    method.begin_task(1, [(inputs[:120], labels[:120]), (inputs[120:], labels[120:])])
    assert {n for n, p in network.named_parameters() if not torch.equal(p, before[n])} <= {
        "heads.1.weight",
        "heads.1.bias",
    }
    features: list[Any] = []
    hook = network.heads.register_forward_pre_hook(lambda _, given: features.append(given[0]))
    answers = network(inputs, 1).softmax(1)
    hook.remove()
    other = LogisticRegression(C=1 / (200 * 0.01), fit_intercept=network.heads[1].bias is not None, tol=1e-8)
    other.fit(features[0].detach().numpy(), labels.numpy())
    theirs = torch.from_numpy(other.predict_proba(features[0].detach().numpy())).float()
    torch.testing.assert_close(answers, theirs, atol=1e-3, rtol=0)


def test_a_network_without_heads_cannot_be_frozen() -> None:
    with pytest.raises(ValueError, match="heads only"):
        METHODS["frozen"](nn.Sequential(nn.Linear(3, 2)), None, exclude=())


def test_lora_trains_its_factors_and_heads_and_leaves_the_weights(tmp_path: Path) -> None:
    learner = run(tmp_path / "run", small("lora", **SPLIT))
    trained = {name for name, p in learner.network.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name or name.startswith("heads.") for name in trained)
    fresh = run(tmp_path / "fresh", small("lora", **SPLIT, tasks=1, lr=1e-12))
    weights = {name: p for name, p in learner.network.named_parameters() if name.endswith("base_layer.weight")}
    assert weights
    for name, weight in weights.items():
        assert torch.equal(weight, fresh.network.get_parameter(name))
    factors = [p for name, p in learner.network.named_parameters() if ".lora_B." in name]
    assert all(p.abs().sum() > 0 for p in factors)


def test_osf_keeps_the_strongest_directions_of_each_weight(tmp_path: Path) -> None:
    start = run(tmp_path / "start", small("osf", **SPLIT, tasks=1, lr=1e-12))
    learner = run(tmp_path / "run", small("osf", **SPLIT, tasks=1))
    for each in (start, learner):
        each.method._merge_adapters()  # type: ignore[attr-defined]
    for name in start.method.targets:  # type: ignore[attr-defined]
        before = start.network.get_submodule(name).weight.detach()
        change = learner.network.get_submodule(name).weight.detach() - before
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        kept = min(before.shape) // 2
        assert change.norm() > 0.01
        assert float((left[:, :kept].mT @ change @ right[:kept].mT).norm() / change.norm()) < 1e-3


def test_osf_raises_an_error_without_linear_layers() -> None:
    with pytest.raises(ValueError, match="osf adapts layers of type Linear, and ResNet18 has none"):
        METHODS["osf"](ResNet18(heads=(2, 2)), OSFSettings(), exclude=["heads.*"])
    METHODS["lora"](ResNet18(heads=(2, 2)), LoRASettings(), exclude=["heads.*"])


def test_without_peft_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"sgp-torch\[peft\]"):
        METHODS["lora"](MLP((4, 4), (2, 2)), LoRASettings(), exclude=["heads.*"])
