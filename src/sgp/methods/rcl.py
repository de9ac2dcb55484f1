"""RCL (Xu & Zhu, NeurIPS 2018): a controller learns by trials how many units a task adds, and old weights stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import Adam

from sgp.methods.growing import Growing, Tensors, gathered, lots_of, units_for
from sgp.methods.method import Batch
from sgp.methods.settings.rcl import RCLFacts, RCLSettings
from sgp.networks.widen import resize, widen
from sgp.patterns import check_patterns

# Deviation of the controller's first weights, uniform within plus and minus this, as published.
CONTROLLER_BOUND = 0.08


class Controller(nn.Module):
    """Draws a number of units for each layer, and learns from rewards by REINFORCE.

    An LSTM of two layers makes one step for each layer of the network. Its first input is a random state, each later
    one the probabilities of the step before. With R the reward, v(state) a linear value and a_l what was drawn:

        policy descends -(R - v) sum log p(a_l),    v descends (R - v)^2

    Args:
        most: what each layer may get at most.
        settings: of the method.
    """

    def __init__(self, most: Sequence[int], settings: RCLSettings) -> None:
        super().__init__()
        options = max(most) + 1
        self.lstm = nn.LSTM(options, settings.controller_units, num_layers=2)
        self.choice = nn.Linear(settings.controller_units, options)
        self.value = nn.Linear(options, 1)
        self.state = torch.randn(options)
        for parameter in (*self.lstm.parameters(), *self.choice.parameters()):
            nn.init.uniform_(parameter, -CONTROLLER_BOUND, CONTROLLER_BOUND)
        numbers = torch.arange(options)
        self.allowed = torch.stack([numbers <= each for each in most])
        self._policy_steps = Adam([*self.lstm.parameters(), *self.choice.parameters()], lr=settings.controller_lr)
        self._value_steps = Adam(self.value.parameters(), lr=settings.value_lr)

    def forward(self) -> Categorical:
        """The probabilities of each number of units: [layers, options]."""
        given, memory, found = self.state, None, []
        for allowed in self.allowed:
            out, memory = self.lstm(given.view(1, 1, -1), memory)
            logits = self.choice(out.flatten()).masked_fill(~allowed, -torch.inf)
            given = logits.softmax(dim=0)
            found.append(logits)
        return Categorical(logits=torch.stack(found))

    def learn(self, choices: Categorical, drawn: Tensor, reward: float) -> None:
        """Take in what a choice was worth."""
        value = self.value(self.state).squeeze()
        advantage = reward - value.item()
        self._value_steps.zero_grad()
        (reward - value).square().backward()
        self._value_steps.step()
        self._policy_steps.zero_grad()
        likelihood = choices.log_prob(drawn).sum()  # type: ignore[no-untyped-call]
        (-advantage * likelihood).backward()
        self._policy_steps.step()


class RCL(RCLFacts, Growing[RCLSettings]):
    """Reinforced continual learning.

    The first task trains the whole network. Before each later one a new controller chooses, `trials` times, how many
    units each layer gets. The network grows by them, is trained for a while on a part of the task's examples and judged
    by the rest: reward = accuracy - xi units added. The network with the best reward is what the loop trains on.

    Weights between old units, their offsets and norm layers never move again. A task trains the weights into its new
    units, those from its new units into old ones, and its head; it is answered by the units of its time. So old
    answers do not change by one bit.
    """

    def __init__(self, network: nn.Module, settings: RCLSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        if isinstance(settings.most_units, dict):  # better now than after a task has been trained
            check_patterns(network, settings.most_units, "most_units")

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        super().begin(head, batches)
        if not self.first_task:
            examples, size = gathered(batches)
            self._search(examples, size)

    def _search(self, examples: Batch, size: int) -> None:
        """Give the network the units and weights of the best trial."""
        sizes, weights = self.now(), self._copy()
        controller = Controller([units_for(self.settings.most_units, name) for name in sizes], self.settings)
        # Two, for BatchNorm cannot normalise one; a handful of examples has to do for both.
        judged = max(2, round(self.settings.judged * len(examples[1])))
        trained = judged if judged + 2 <= len(examples[1]) else 0
        best: tuple[float, dict[str, int], Tensors] | None = None
        for _ in range(self.settings.trials):
            choices = controller()
            drawn = choices.sample()
            for name, more in zip(sizes, drawn.tolist(), strict=True):
                widen(self.network, self.axes, name, more)
            self._gates = self._may_move()
            self._train((examples[0][trained:], examples[1][trained:]), size, self.settings.trial_epochs)
            accuracy = self._accuracy((examples[0][:judged], examples[1][:judged]), size)
            reward = accuracy - self.settings.size_penalty * int(drawn.sum())
            controller.learn(choices, drawn, reward)
            if best is None or reward > best[0]:
                best = reward, self.now(), self._copy()
            resize(self.network, self.axes, sizes)
            self.network.load_state_dict(weights)
        assert best is not None
        resize(self.network, self.axes, best[1])
        self.network.load_state_dict(best[2])

    def _copy(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    @torch.no_grad()
    def _accuracy(self, examples: Batch, size: int) -> float:
        """The share of examples that the task's head answers right."""
        training = self.network.training
        self.network.eval()
        right = 0
        for rows in lots_of(torch.arange(len(examples[1])), size):
            logits = self.network(examples[0][rows], int(self._current))
            right += int((logits.argmax(dim=1) == examples[1][rows]).sum())
        self.network.train(training)
        return right / len(examples[1])

    def _may_move(self) -> Tensors | None:
        if self.first_task:
            return None
        gates = self._new_parts()
        if self.settings.deep_units == "as-drawn":
            for name, start in list(self.before().items())[1:]:
                gates[f"{name}.weight"][start:] = False
        return gates

    def _penalise(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        gradient.add_(parameter, alpha=self.settings.l2)
