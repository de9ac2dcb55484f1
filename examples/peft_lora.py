"""Fine-tune a model with LoRA without losing what it could do: digits upright, then mirrored, then transposed.

    python examples/peft_lora.py    # a few seconds on a CPU; needs peft and scikit-learn

Each task gets an adapter of its own. Before a new task the old adapter is merged into the base, and the directions of
the memory are removed from the new lora_A, so whatever lora_B learns, the layer's output for an old input stays.
"""

import math

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sgp

VIEWS = [lambda x: x, lambda x: x.flip(2), lambda x: x.mT]


def load_task(task: int, test: bool) -> tuple[Tensor, Tensor]:
    """Return all digits in one of three views; every fifth image is for testing."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images / 8 - 1).float().view(-1, 8, 8), torch.from_numpy(digits)
    chosen = (torch.arange(len(y)) % 5 == 0) == test
    return VIEWS[task](x[chosen]).flatten(1), y[chosen]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: int) -> None:
    x, y = load_task(task, test=False)
    for _ in range(10):
        for batch in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def compute_accuracy(model: nn.Module, task: int) -> float:
    x, y = load_task(task, test=True)
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).float().mean().item()


@torch.no_grad()
def start_adapter(model: PeftModel, memory: sgp.GradientMemory, protect: bool) -> None:
    """Merge the adapter into the base and start a new one, without the directions that old tasks need."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            layer.get_base_layer().weight += layer.get_delta_weight("default")
            layer.reset_lora_parameters("default", init_lora_weights=True)
            first = layer.lora_A["default"].weight
            if protect:
                first.copy_(memory.project(first, f"{name}.lora_A.default"))


def learn_tasks(protect: bool) -> tuple[float, float]:
    """Return ACC and BWT in percent."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    train(base, torch.optim.Adam(base.parameters(), lr=1e-3), task=0)  # in place of a pretrained model
    model = get_peft_model(base, LoraConfig(r=16, target_modules=["0", "2"]))
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=math.inf, exclude=["*.lora_B.*"])
    learned = [compute_accuracy(model, 0)]
    for task in range(1, len(VIEWS)):
        if protect:
            memory.update(load_task(task - 1, test=False)[0].split(16))
        start_adapter(model, memory, protect)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        if protect:
            memory.attach(optimizer)
        train(model, optimizer, task)
        learned.append(compute_accuracy(model, task))
    final = [compute_accuracy(model, task) for task in range(len(VIEWS))]
    return sum(final) / len(VIEWS), (sum(final) - sum(learned)) / (len(VIEWS) - 1)


if __name__ == "__main__":
    for name, protect in {"without the memory": False, "with the memory": True}.items():
        print("{:<18}  ACC {:5.1f}  BWT {:5.1f}".format(name, *learn_tasks(protect)))
