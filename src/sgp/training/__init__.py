"""The supervised loop over a stream of tasks."""

from sgp.training.loop import Learner
from sgp.training.recorded import Watcher

__all__ = ["Learner", "Watcher"]
