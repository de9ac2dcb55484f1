"""Adam with the step counter of the published Adam-GP."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam, Optimizer


class AdamByUpdate(Adam):
    """Adam with a bias correction that counts updates of PPO instead of gradient steps.

    The moments change at every step, but the powers of beta1 and beta2 only once per update: a warm-up over thousands
    of updates, which the published GPM and SGP have and its other methods do not.

    Attributes:
        update: Number of the update that the steps belong to, from 1.
    """

    update = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # A hook, since torch would run the hooks of a step that calls Adam's twice, and a method would act twice.
        self.register_step_pre_hook(_set_counter)


def _set_counter(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, AdamByUpdate)
    for state in optimizer.state.values():
        if "step" in state:
            # The step itself adds one.
            state["step"].fill_(optimizer.update - 1)
