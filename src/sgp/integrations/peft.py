"""LoRA adapters of PEFT, a new one for each task, whose updates a memory projects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sgp.projection import GradientMemory

try:
    from peft.tuners.lora import LoraLayer
except ModuleNotFoundError as error:
    raise ImportError('this needs PEFT: pip install "sgp-torch[peft]"', name="peft") from error


@torch.no_grad()
def next_adapter(model: nn.Module, memory: GradientMemory, *, adapter: str = "default") -> None:
    """Begin a task with a LoRA adapter that leaves the outputs for everything in the memory as they are.

    The adapter so far is merged into the base weights and reset, and what the memory protects is projected out of the
    new ``lora_A``. Its output for a protected input is then zero, so ``lora_B`` needs no protection: it is excluded
    from the memory, if it is not yet, and learns freely, while the memory projects the steps of ``lora_A``. Call it
    between two tasks after ``memory.update``, or before the first task after an update with calibration data::

        model = get_peft_model(base, LoraConfig(...))
        memory = sgp.GradientMemory(model, threshold=0.95, exclude=["*.lora_B.*"])
        memory.update(calibration)
        for task in tasks:
            next_adapter(model, memory)
            optimizer = torch.optim.AdamW(model.parameters())
            memory.attach(optimizer)
            train(model, optimizer, task)
            memory.update(task.loader)

    Args:
        model: Model with LoRA adapters on its linear layers, as ``get_peft_model`` returns it.
        memory: Memory of this model, or of a model that contains it or that it contains.
        adapter: Name of the adapter.

    Raises:
        RuntimeError: The adapter was trained by an optimizer that is not attached.
        ValueError: The model has no such adapter, the memory does not protect it, or the adapter has parts that
            change the outputs for protected inputs (DoRA, ``lora_bias``) or is not on a linear layer.
    """
    layers = dict(_find_adapted_layers(model, adapter))
    if not layers:
        raise ValueError(f"the model has no LoRA layer with an adapter {adapter!r}")
    protected = {id(layer.weight.tensor): name for name, layer in memory.layers.items()}
    for name, layer in layers.items():
        if id(layer.lora_A[adapter].weight) not in protected:
            raise ValueError(
                f"the memory does not protect {name}.lora_A.{adapter}: make the memory after get_peft_model, with the "
                "adapter active, and do not exclude lora_A"
            )
    is_second_protected = any(id(layer.lora_B[adapter].weight) in protected for layer in layers.values())
    with memory.edit_weights(exclude=[f"*.lora_B.{adapter}"] if is_second_protected else []):
        for layer in layers.values():
            if layer.merged:
                layer.unmerge()
            layer.merge(adapter_names=[adapter])
            layer.merged_adapters.clear()  # for good: the adapter is reset, so it cannot be unmerged
            layer.reset_lora_parameters(adapter, init_lora_weights=True)
            weight = layer.lora_A[adapter].weight
            weight.copy_(memory.project(weight, protected[id(weight)]))


def _find_adapted_layers(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yield the LoRA layers that have an adapter, by name.

    Raises:
        ValueError: One of them has more than two linear factors.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if adapter in layer.lora_embedding_A:
            raise ValueError(f"{name} is an adapted embedding: leave embeddings out of target_modules")
        if adapter not in layer.lora_A:
            continue
        if adapter in layer.lora_magnitude_vector or layer.lora_bias[adapter]:
            raise ValueError(f"{name} has DoRA or a bias: use LoraConfig(use_dora=False, lora_bias=False)")
        if not isinstance(layer.lora_A[adapter], nn.Linear):
            raise ValueError(f"{name}.lora_A.{adapter} is no nn.Linear: adapt linear layers only")
        yield name, layer
