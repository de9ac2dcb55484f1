"""Adam as the published Adam-GP counts."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, Optimizer


class AdamByUpdate(Adam):
    """Adam whose bias correction counts updates of PPO instead of gradient steps.

    The moments change at every step, the powers of beta1 and beta2 once in an update: a warm-up that lasts thousands of
    updates, which the published GPM and SGP have and its other methods have not.

    Attributes:
        update: the number of the update that the steps belong to, from 1.
    """

    update = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Not by a step of its own around Adam's: torch would run the hooks on both, and a method act twice.
        self.register_step_pre_hook(_count_updates)


def _count_updates(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, AdamByUpdate)
    for state in optimizer.state.values():
        if "step" in state:  # which the step itself will add one to
            state["step"].fill_(optimizer.update - 1)
