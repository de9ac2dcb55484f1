"""The supervised loop over a stream of tasks."""

from sgp.training.loop import Learner, Watcher

__all__ = ["Learner", "Watcher"]
