"""Protect a network that Lightning trains: digits, upright, mirrored and inverted, in a convolutional network.

python examples/lightning_trainer.py    # some seconds on a CPU; needs lightning and scikit-learn
"""

import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp.integrations.lightning import GradientMemoryCallback

VIEWS = [lambda x: x, lambda x: x.flip(3), lambda x: -x.mT]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.body = nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.layers = nn.Sequential(self.body, nn.Linear(128, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def load_task(task: int, test: bool) -> TensorDataset:
    """Return all digits in one of three views; every fifth image is for testing."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels / 8 - 1).float().view(-1, 1, 8, 8), torch.from_numpy(digits)
    chosen = (torch.arange(len(y)) % 5 == 0) == test
    return TensorDataset(VIEWS[task](x[chosen]).contiguous(), y[chosen])


def compute_accuracy(model: Classifier, task: int) -> float:
    x, y = load_task(task, test=True).tensors
    with torch.no_grad():
        return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


def learn_tasks(protect: bool) -> tuple[float, float]:
    """Return ACC and BWT in percent."""
    torch.manual_seed(0)
    model = Classifier()
    callbacks = [GradientMemoryCallback(sgp.GradientMemory(model, threshold=0.97, alpha=10))] if protect else []
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    learned = []
    for task in range(len(VIEWS)):
        loader = DataLoader(load_task(task, test=False), batch_size=32, shuffle=True)
        Trainer(max_epochs=5, accelerator="cpu", callbacks=callbacks, **quiet).fit(model, loader)
        learned.append(compute_accuracy(model, task))
    final = [compute_accuracy(model, task) for task in range(len(VIEWS))]
    return sum(final) / len(VIEWS), (sum(final) - sum(learned)) / (len(VIEWS) - 1)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, protect in {"without the memory": False, "with the memory": True}.items():
        print("{:<18}  ACC {:5.1f}  BWT {:5.1f}".format(name, *learn_tasks(protect)))
