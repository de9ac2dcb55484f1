"""Protect a network in your own training loop: five tasks of two digits each, with a head for each task.

python examples/own_loop.py    # a few seconds on a CPU; needs scikit-learn
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp

TASKS, EPOCHS = 5, 10


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(100, 2) for _ in range(TASKS))

    def forward(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.heads[task](self.body(x))
        return logits


def load_task(task: int, test: bool) -> TensorDataset:
    """Return the digits 2 * task and 2 * task + 1; every fifth image is for testing."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels / 8 - 1).float(), torch.from_numpy(digits)
    chosen = (y // 2 == task) & ((torch.arange(len(y)) % 5 == 0) == test)
    return TensorDataset(x[chosen], y[chosen] % 2)


def compute_accuracy(model: Classifier, task: int) -> float:
    x, y = load_task(task, test=True).tensors
    with torch.no_grad():
        return 100 * (model(x, task).argmax(1) == y).float().mean().item()


def learn_tasks(protect: bool) -> tuple[float, float]:
    """Return ACC and BWT in percent."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    memory = sgp.GradientMemory(model, threshold=0.97, alpha=10, exclude=["heads.*"])
    if protect:
        memory.attach(optimizer)
    learned = []
    for task in range(TASKS):
        loader = DataLoader(load_task(task, test=False), batch_size=16, shuffle=True)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x, task), y).backward()
                optimizer.step()
        if protect:
            memory.update(loader, forward=lambda batch: model.body(batch[0]))
        learned.append(compute_accuracy(model, task))
    final = [compute_accuracy(model, task) for task in range(TASKS)]
    return sum(final) / TASKS, (sum(final) - sum(learned)) / (TASKS - 1)


if __name__ == "__main__":
    for name, protect in {"without the memory": False, "with the memory": True}.items():
        print("{:<18}  ACC {:5.1f}  BWT {:5.1f}".format(name, *learn_tasks(protect)))
