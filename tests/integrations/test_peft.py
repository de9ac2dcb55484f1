"""LoRA adapters of PEFT, on a tiny BERT with random weights."""

import math

import pytest
import torch
from torch import Tensor, nn

import sgp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="of the extra 'peft'")

from sgp.integrations.peft import next_adapter  # noqa: E402

Batch = dict[str, Tensor]


def make_text(task: int) -> Batch:
    generator = torch.Generator().manual_seed(task)
    words = torch.randint(20 * task, 20 * (task + 1), (3, 5), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def make_adapted_model(rank: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        initializer_range=0.1,
    )
    base = transformers.BertModel(config, add_pooling_layer=False)
    model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=["query", "value"]))
    return model


def compute_features(model: nn.Module, task: int) -> Tensor:
    with torch.no_grad():
        return model.eval()(**make_text(task)).last_hidden_state.clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: int, steps: int = 15) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(**make_text(task)).last_hidden_state
        (outputs - torch.linspace(-1, 1, outputs.shape[-1])).square().mean().backward()
        optimizer.step()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


def test_one_adapter_for_all_tasks_fills_up_with_a_warning() -> None:
    model = make_adapted_model(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = make_adam(model)
    memory.attach(optimizer)
    train(model, optimizer, 0)
    with pytest.warns(UserWarning, match=r"nearly all of the capacity is blocked in .*lora_B\.default' \(100\.0%\)"):
        memory.update([make_text(0)])
    old = compute_features(model, 0)
    train(model, optimizer, 1)
    assert measure_drift(compute_features(model, 0), old) < 1e-4
    full = [layer.layer for layer in memory.capacity().layers if layer.free == 0]
    assert full == [name for name in memory.subspaces if ".lora_B." in name]


@torch.no_grad()
def write_out_next_adapter(model: nn.Module, memory: sgp.GradientMemory) -> None:
    """Merge, reset and project by hand."""
    for name, layer in model.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.get_base_layer().weight += layer.get_delta_weight("default")
            layer.reset_lora_parameters("default", init_lora_weights=True)
            first = layer.lora_A["default"].weight
            first.copy_(memory.project(first, f"{name}.lora_A.default"))


def blind_memory(model: nn.Module) -> sgp.GradientMemory:
    return sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, exclude=["*.lora_B.*"])


def test_next_adapter_equals_merging_resetting_and_projecting_by_hand() -> None:
    states = []
    for begin in (next_adapter, write_out_next_adapter):
        model = make_adapted_model(rank=4)
        memory = blind_memory(model)
        train(model, make_adam(model), 0)
        memory.update([make_text(0)])
        torch.manual_seed(1)
        begin(model, memory)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_a_new_adapter_for_each_task_never_fills_up() -> None:
    model = make_adapted_model(rank=4)
    memory = blind_memory(model)
    train(model, make_adam(model), 0)
    memory.update([make_text(0)])
    old, new = compute_features(model, 0), compute_features(model, 1)
    next_adapter(model, memory)
    assert measure_drift(compute_features(model, 0), old) < 1e-5  # the old adapter is in the base now
    optimizer = make_adam(model)
    memory.attach(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_B." in name}
    train(model, optimizer, 1)
    assert all((model.get_parameter(name) != value).any() for name, value in before.items())
    assert measure_drift(compute_features(model, 0), old) < 1e-4
    assert measure_drift(compute_features(model, 1), new) > 0.02
    memory.update([make_text(1)])
    assert memory.tasks == 2


def test_before_the_first_task_the_adapter_is_blind_to_the_calibration_data() -> None:
    model = make_adapted_model(rank=4)
    memory = blind_memory(model)
    memory.update([make_text(0)])
    old, new = compute_features(model, 0), compute_features(model, 1)
    next_adapter(model, memory)
    memory.update([make_text(2)])  # an edit is no training without projection
    next_adapter(model, memory)
    optimizer = make_adam(model)
    memory.attach(optimizer)
    train(model, optimizer, 1)
    assert measure_drift(compute_features(model, 0), old) < 1e-4
    assert measure_drift(compute_features(model, 1), new) > 0.02
    assert memory.check(make_text(0)).leak < 1e-5


def test_the_second_factor_is_excluded_if_it_is_not_yet() -> None:
    model = make_adapted_model(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    with pytest.warns(UserWarning, match="nearly all of the capacity is blocked"):
        memory.update([make_text(0)])
    optimizer = make_adam(model)
    memory.attach(optimizer)
    old, new = compute_features(model, 0), compute_features(model, 1)
    next_adapter(model, memory)
    assert not any("lora_B" in name for name in memory.layers)
    train(model, optimizer, 1)
    assert measure_drift(compute_features(model, 0), old) < 1e-4
    assert measure_drift(compute_features(model, 1), new) > 0.02


def test_an_adapter_that_is_merged_is_merged_once() -> None:
    model = make_adapted_model(rank=4)
    memory = blind_memory(model)
    train(model, make_adam(model), 0)
    memory.update([make_text(0)])
    old = compute_features(model, 0)
    model.merge_adapter()
    next_adapter(model, memory)
    assert measure_drift(compute_features(model, 0), old) < 1e-5


def test_an_adapter_that_was_trained_without_the_memory_is_refused() -> None:
    model = make_adapted_model(rank=4)
    memory = blind_memory(model)
    memory.update([make_text(0)])
    train(model, make_adam(model), 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"lora_A.* was trained by an optimizer that is not attached"):
        next_adapter(model, memory)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_made_blind_is_refused() -> None:
    model = make_adapted_model(rank=4)
    with pytest.raises(ValueError, match="no LoRA layer with an adapter 'other'"):
        next_adapter(model, blind_memory(model), adapter="other")
    memory = sgp.GradientMemory(model, threshold=1.0, exclude=["*.lora_A.*"])
    with pytest.raises(ValueError, match=r"the memory does not protect .*query\.lora_A\.default"):
        next_adapter(model, memory)
    dora = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"], use_dora=True))
    with pytest.raises(ValueError, match="has DoRA or a bias"):
        next_adapter(dora, memory)
    words = peft.get_peft_model(nn.Sequential(nn.Embedding(4, 4)), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="is an adapted embedding"):
        next_adapter(words, memory)
