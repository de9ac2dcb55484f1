"""Adam as the published Adam-GP counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam


class AdamByUpdate(Adam):
    """Adam whose bias correction counts updates of PPO instead of gradient steps.

    The moments change at every step, the powers of beta1 and beta2 once in an update: a warm-up that lasts thousands of
    updates, which the published GPM and SGP have and its other methods have not.

    Attributes:
        update: the number of the update that the steps belong to, from 1.
    """

    update = 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step."""
        for state in self.state.values():
            if "step" in state:  # which the step itself will add one to
                state["step"].fill_(self.update - 1)
        return super().step(closure)
