"""Learn new classes of digits.

A network with ten outputs learns to tell the digits 0 to 3 apart, then 4 to 6, then 7 to 9. Each task is tested as the
whole problem: the network has to choose among all ten classes, and is not given the task of an image.

This is the hardest setting of continual learning. After finetuning, the network predicts a class of the last task for
every image. Scaled gradient projection keeps most of the predictions, without a single stored image. It learns the last
classes a little less well. Part of what it loses cannot be avoided without stored images: no image of a 3 is ever in a
batch with one of an 8, so nothing trains the network to tell them apart.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sgp
from examples.gallery.figure import draw

TASKS, EPOCHS = ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9]), 10


def load(test: bool) -> tuple[Tensor, Tensor]:
    """Return images [n, 64] and their digits; every fifth image is for testing."""
    pixels, digits = load_digits(return_X_y=True)
    chosen = (torch.arange(len(digits)) % 5 == 1) == test
    return torch.from_numpy(pixels / 8 - 1).float()[chosen], torch.from_numpy(digits)[chosen]


@torch.no_grad()
def test(model: nn.Module) -> list[float]:
    """Return the accuracy on each task's digits, among all ten, in percent."""
    x, y = load(test=True)
    right = model(x).argmax(1) == y
    return [100 * right[torch.isin(y, torch.tensor(classes))].float().mean().item() for classes in TASKS]


def learn(protect: bool) -> list[list[float]]:
    """Learn all tasks, and return the accuracies before and after each epoch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=10)
    if protect:
        memory.attach(optimizer)
    scores = [test(model)]
    x, y = load(test=False)
    for classes in TASKS:
        own = torch.isin(y, torch.tensor(classes)).nonzero().flatten()
        for _ in range(EPOCHS):
            for rows in own[torch.randperm(len(own))].split(16):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            scores.append(test(model))
        if protect:
            memory.update(x[own].split(100))
    return scores


if __name__ == "__main__":
    draw(
        "class_incremental",
        {"finetuning": learn(protect=False), "SGP": learn(protect=True)},
        tasks={f"digits {c[0]} to {c[-1]}": (i * EPOCHS, (i + 1) * EPOCHS) for i, c in enumerate(TASKS)},
        score="accuracy (%)",
        time="epochs",
    )
