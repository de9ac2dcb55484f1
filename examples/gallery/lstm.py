"""Train an LSTM on the sensors of one machine after another.

Three machines have four states each, and sixteen sensors that are read forty times. The readings of a state differ
between machines: the waves have other frequencies and reach the sensors in another mixture. One LSTM with one
output layer learns the machines in turn. After each of them, the memory finds which directions the inputs and the
hidden states of the LSTM use; later steps hardly change what the network does along these.

`nn.LSTM` is protected like any other layer: it has a subspace for its inputs and one for its hidden states.
"""

import math

import torch
from torch import Tensor, nn

import sgp
from examples.gallery.figure import draw

MACHINES, STATES, EPOCHS = 3, 4, 10


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, STATES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def record(machine: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return readings [count, 40, 16] and states of a machine."""
    own = torch.Generator().manual_seed(machine)
    mixture = torch.randn(3, 16, generator=own)
    frequencies = 0.15 + 1.2 * torch.rand(STATES, 3, generator=own)
    generator = torch.Generator().manual_seed(1000 + seed)
    states = torch.randint(STATES, (count,), generator=generator)
    phases = 2 * math.pi * torch.rand(count, 1, 3, generator=generator)
    waves = torch.sin(frequencies[states].unsqueeze(1) * torch.arange(40.0).view(1, -1, 1) + phases)
    return waves @ mixture + 0.1 * torch.randn(count, 40, 16, generator=generator), states


@torch.no_grad()
def test(model: nn.Module) -> list[float]:
    """Return the accuracy on each machine in percent."""
    recorded = [record(machine, 400, seed=3) for machine in range(MACHINES)]
    return [100 * (model(x).argmax(1) == y).float().mean().item() for x, y in recorded]


def learn(protect: bool) -> list[list[float]]:
    """Learn all machines, and return the accuracies after each epoch."""
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    memory = sgp.GradientMemory(model, threshold=0.97, alpha=10)
    if protect:
        memory.attach(optimizer)
    scores = [test(model)]
    for machine in range(MACHINES):
        x, y = record(machine, 1200, seed=2)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scores.append(test(model))
        if protect:
            memory.update(x.split(100))
    return scores


if __name__ == "__main__":
    draw(
        "lstm",
        {"finetuning": learn(protect=False), "SGP": learn(protect=True)},
        tasks={f"machine {i + 1}": (i * EPOCHS, (i + 1) * EPOCHS) for i in range(MACHINES)},
        score="accuracy (%)",
        time="epochs",
    )
