"""RCL (Xu & Zhu, NeurIPS 2018): a controller learns by trial how many units a task adds, and old weights stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import Adam

from sgp.methods.growing import Growing, gather_examples, split_rows
from sgp.methods.layer_settings import check_setting, get_value
from sgp.methods.method import Batch, clone_tensors, use_mode
from sgp.methods.settings import RCLFacts, RCLSettings
from sgp.methods.wired import Tensors
from sgp.networks.widen import resize, widen

# The controller's first weights are uniform within plus and minus this, as published.
CONTROLLER_BOUND = 0.08


class Controller(nn.Module):
    """Draws a number of units for each layer, and learns from rewards by REINFORCE.

    An LSTM of two layers makes one step for each layer of the network. Its first input is a random state, each later
    one the probabilities of the step before. With R the reward, v(state) a linear value and a_l the drawn numbers:

        policy descends -(R - v) sum log p(a_l),    v descends (R - v)^2

    Args:
        most: Largest number of units of each layer.
        settings: Settings of the method.
    """

    def __init__(self, most: Sequence[int], settings: RCLSettings) -> None:
        super().__init__()
        options = max(most) + 1
        self.lstm = nn.LSTM(options, settings.controller_units, num_layers=2)
        self.choice = nn.Linear(settings.controller_units, options)
        self.value = nn.Linear(options, 1)
        self.state = torch.randn(options)
        policy = [*self.lstm.parameters(), *self.choice.parameters()]
        for parameter in policy:
            nn.init.uniform_(parameter, -CONTROLLER_BOUND, CONTROLLER_BOUND)
        numbers = torch.arange(options)
        self.allowed = torch.stack([numbers <= each for each in most])
        self._policy_optimizer = Adam(policy, lr=settings.controller_lr)
        self._value_optimizer = Adam(self.value.parameters(), lr=settings.value_lr)

    def forward(self) -> Categorical:
        """Compute the probabilities of each number of units: [layers, options]."""
        step_input, memory, found = self.state, None, []
        for allowed in self.allowed:
            out, memory = self.lstm(step_input.view(1, 1, -1), memory)
            logits = self.choice(out.flatten()).masked_fill(~allowed, -torch.inf)
            step_input = logits.softmax(dim=0)
            found.append(logits)
        return Categorical(logits=torch.stack(found))

    def learn(self, choices: Categorical, drawn: Tensor, reward: float) -> None:
        """Update policy and value by the reward of a draw."""
        value = self.value(self.state).squeeze()
        advantage = reward - value.item()
        self._value_optimizer.zero_grad()
        (reward - value).square().backward()
        self._value_optimizer.step()
        self._policy_optimizer.zero_grad()
        likelihood = choices.log_prob(drawn).sum()  # type: ignore[no-untyped-call]
        (-advantage * likelihood).backward()
        self._policy_optimizer.step()


class RCL(RCLFacts, Growing[RCLSettings]):
    """Reinforced continual learning.

    The first task trains the whole network. Before each later one a new controller chooses, `trials` times, how many
    units each layer gets. The network grows by them, is trained for a while on a part of the task's examples and
    evaluated on the rest: reward = accuracy - xi units added. The network with the best reward is what the trainer
    trains.

    Weights between old units, their biases and norm layers never move again. A task trains the weights into its new
    units, those from its new units into old ones, and its head; it uses the units of its time. So the outputs of old
    tasks do not change by one bit.
    """

    def __init__(self, network: nn.Module, settings: RCLSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        check_setting(network, "most_units", settings.most_units)

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        super().begin_task(head, batches)
        if not self.is_first_task:
            examples, size = gather_examples(batches)
            self._search(examples, size)

    def _search(self, examples: Batch, size: int) -> None:
        """Give the network the units and weights of the best trial."""
        inputs, labels = examples
        sizes, weights = self.count_units(), clone_tensors(self.network.state_dict())
        most = [get_value("most_units", self.settings.most_units, name, default=0) for name in sizes]
        controller = Controller(most, self.settings)
        # Two, for BatchNorm cannot normalize one; if there are too few examples, the same ones serve both purposes.
        judged = max(2, round(self.settings.judged * len(labels)))
        trained = judged if judged + 2 <= len(labels) else 0
        best: tuple[float, dict[str, int], Tensors] | None = None
        for _ in range(self.settings.trials):
            choices = controller()
            drawn = choices.sample()
            for name, more in zip(sizes, drawn.tolist(), strict=True):
                widen(self.network, self.axes, name, more)
            self._gates = self._build_gates()
            self._train((inputs[trained:], labels[trained:]), size, self.settings.trial_epochs)
            accuracy = self._compute_accuracy((inputs[:judged], labels[:judged]), size)
            reward = accuracy - self.settings.size_penalty * int(drawn.sum())
            controller.learn(choices, drawn, reward)
            if best is None or reward > best[0]:
                best = reward, self.count_units(), clone_tensors(self.network.state_dict())
            resize(self.network, self.axes, sizes)
            self.network.load_state_dict(weights)
        assert best is not None
        resize(self.network, self.axes, best[1])
        self.network.load_state_dict(best[2])

    @torch.no_grad()
    def _compute_accuracy(self, examples: Batch, size: int) -> float:
        inputs, labels = examples
        with use_mode(self.network, training=False):
            predicted = [
                self.network(inputs[rows], int(self._current)).argmax(dim=1)
                for rows in split_rows(torch.arange(len(labels)), size)
            ]
        return int((torch.cat(predicted) == labels).sum()) / len(labels)

    def _build_gates(self) -> Tensors | None:
        if self.is_first_task:
            return None
        gates = self._open_new_parts()
        if self.settings.deep_units == "as-drawn":
            for name, start in list(self.count_old_units().items())[1:]:
                gates[f"{name}.weight"][start:] = False
        return gates

    def _add_penalties(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        gradient.add_(parameter, alpha=self.settings.l2)
