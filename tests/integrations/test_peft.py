"""LoRA adapters of PEFT, on a tiny BERT with random weights."""

import math

import pytest
import torch
from torch import Tensor, nn

import sgp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="of the extra 'peft'")
Batch = dict[str, Tensor]


def text(task: int) -> Batch:
    generator = torch.Generator().manual_seed(task)
    words = torch.randint(20 * task, 20 * (task + 1), (3, 5), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def adapted(rank: int) -> nn.Module:
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


def features(model: nn.Module, task: int) -> Tensor:
    with torch.no_grad():
        return model.eval()(**text(task)).last_hidden_state.clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: int, steps: int = 15) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(**text(task)).last_hidden_state
        (outputs - torch.linspace(-1, 1, outputs.shape[-1])).square().mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


def test_the_four_lines_work_and_say_that_the_second_factor_is_full() -> None:
    model = adapted(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = adam(model)
    memory.attach(optimizer)
    train(model, optimizer, 0)
    with pytest.warns(UserWarning, match=r"nearly all of the capacity is blocked in .*lora_B\.default' \(100\.0%\)"):
        memory.update([text(0)])
    old = features(model, 0)
    train(model, optimizer, 1)
    assert drift(features(model, 0), old) < 1e-4
    full = [layer.layer for layer in memory.capacity().layers if layer.free == 0]
    assert full == [name for name in memory.subspaces if ".lora_B." in name]


@torch.no_grad()
def next_adapter(model: nn.Module, memory: sgp.GradientMemory) -> None:
    """As docs/trainers.md shows it."""
    for name, layer in model.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.get_base_layer().weight += layer.get_delta_weight("default")
            layer.reset_lora_parameters("default", init_lora_weights=True)
            first = layer.lora_A["default"].weight
            first.copy_(memory.project(first, f"{name}.lora_A.default"))


def test_a_new_adapter_for_each_task_that_is_blind_to_the_old_ones_never_fills_up() -> None:
    model = adapted(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, exclude=["*.lora_B.*"])
    train(model, adam(model), 0)
    memory.update([text(0)])
    old, new = features(model, 0), features(model, 1)
    next_adapter(model, memory)
    assert drift(features(model, 0), old) < 1e-5  # the old adapter is in the base now
    optimizer = adam(model)
    memory.attach(optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_B." in name}
    train(model, optimizer, 1)
    assert all((model.get_parameter(name) != value).any() for name, value in before.items())
    assert drift(features(model, 0), old) < 1e-4
    assert drift(features(model, 1), new) > 0.02
    memory.update([text(1)])
    assert memory.tasks == 2
