"""Callback for the ``Trainer`` of Lightning, from the package ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sgp.heads import realign
from sgp.integrations.optimizers import attach_all
from sgp.integrations.reference import (
    Heads,
    dump_reference,
    find_reference,
    list_batches,
    list_heads,
    load_reference,
)
from sgp.integrations.tracking import collect_capacity, collect_changes, collect_update
from sgp.projection import GradientMemory, OptimizerHook
from sgp.projection.anchor import Anchor
from sgp.projection.batches import evaluation_pass, make_forward
from sgp.projection.modes import Mode

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        try:
            from pytorch_lightning import Callback
        except ModuleNotFoundError as error:
            raise ImportError('this needs lightning: pip install "sgp-torch[lightning]"', name="lightning") from error

# Qualified names of the placeholders that a module without a forward has.
NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")


class GradientMemoryCallback(Callback):
    """Callback that protects earlier tasks while Lightning trains the next one; each ``fit`` is one task.

    ::

        for task in tasks:
            Trainer(callbacks=[GradientMemoryCallback(memory)]).fit(module, task)

    When training starts, the memory is attached to every optimizer that has parameters of its model; when training
    ends, it is updated from the training data. It is saved in Lightning's checkpoints. The loggers of the Trainer
    receive free capacity and captured energy of each group of layers when training begins and ends.

    Args:
        memory: Memory of the LightningModule or of a part of it.
        samples: Number of inputs that the update uses; None for all, as in ``memory.update``.
        mask: Function that returns which positions count, as in ``memory.update``.
        forward: Function that runs one batch of the training data, as in ``memory.update``; None to run the memory's
            model, whose ``forward`` must then accept such a batch. It is tried on the first batch, so that it does not
            fail after training.
        update: Whether to update the memory; if False, call ``memory.update`` yourself.
        mode: Projection mode, as in ``memory.attach``.
        every: Number of steps that are projected at once, as in ``memory.attach``. A validation sees projected weights.
        heads: Heads of earlier tasks, which are realigned to the moved features before the update
            (:func:`sgp.heads.realign`).
        features: Function that returns the inputs of the heads for a batch of the training data.
        check: Batches of earlier tasks, on which leak and drift since the last update are measured and logged after
            each validation and at the end of training. A batch costs three forward passes.

    Raises:
        TypeError: ``check`` is a single batch.
        ValueError: ``heads`` is passed without ``features``.
    """

    def __init__(
        self,
        memory: GradientMemory,
        *,
        samples: int | Mapping[str, int] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        forward: Callable[[Any], Any] | None = None,
        update: bool = True,
        mode: Mode = "auto",
        every: int = 1,
        heads: Heads = (),
        features: Callable[[Any], Tensor] | None = None,
        check: Iterable[Any] = (),
    ) -> None:
        self.memory = memory
        self.samples = samples
        self.mask = mask
        self.forward = forward
        self.update = update
        self.mode = mode
        self.every = every
        self.heads = list_heads(heads, features)
        self.features = features
        self.check = list_batches(check)
        self.hooks: list[OptimizerHook] = []
        self._reference: Anchor | None = None
        self._loaded: dict[str, Any] | None = None
        self._is_updated = False
        self._is_tried = False
        self._evaluation = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the update will be able to run the memory's model.

        Raises:
            TypeError: The model has no ``forward``, and none was passed.
        """
        model = type(self.memory.model)
        if self.update and self.forward is None and model.forward.__qualname__ in NO_FORWARD:
            raise TypeError(
                f"{model.__name__} has no forward(), which the update of the memory runs: pass "
                "GradientMemoryCallback(memory, forward=...), a function that runs one batch of the training data"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the memory, and resume from a checkpoint if the trainer does."""
        self._evaluation.close()  # left open if a validation of an earlier training failed
        self.hooks = attach_all(self.memory, trainer.optimizers, mode=self.mode, every=self.every)
        self._is_updated = self._is_tried = False
        self._reference = None
        self._restore()
        self._reference = self._reference or find_reference(self.memory, self.heads, self.check)
        _log(trainer, collect_capacity(self.memory))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Try the update's forward pass on the first batch."""
        if self.update and not self._is_tried:
            with evaluation_pass(pl_module, ()), trainer.precision_plugin.forward_context():
                self._forward(batch)
        self._is_tried = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Project the weights until the validation ends."""
        for hook in self.hooks:
            self._evaluation.enter_context(hook.projected())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log leak and drift, and restore the weights of training. Lightning saves checkpoints after this."""
        if self.hooks and not trainer.sanity_checking:
            self._log_changes(trainer, pl_module)
        self._evaluation.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Realign the heads of earlier tasks, update the memory, and detach it from the optimizers."""
        try:
            self._end_task(trainer, pl_module)
        finally:
            self._reference = None
            for hook in self.hooks:
                hook.detach()
            self.hooks = []

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the task if ``fit`` was resumed from a checkpoint after the last step but before the update."""
        if self._loaded is not None:
            self._restore()
            self._end_task(trainer, pl_module)
            self._reference = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's checkpoint."""
        hooks = [hook.state_dict() for hook in self.hooks]
        return {
            "memory": self.memory.state_dict(),
            "hooks": hooks,
            "updated": self._is_updated,
            "reference": dump_reference(self._reference),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of Lightning's checkpoint, which is loaded after the weights."""
        self._loaded = state_dict

    def _restore(self) -> None:
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self.memory.load_state_dict(state["memory"])
        self._reference = load_reference(state.get("reference"))
        self._is_updated = state["updated"] and not self.hooks
        for hook, saved in zip(self.hooks, state["hooks"], strict=False):
            hook.load_state_dict(saved)

    def _end_task(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        assert loader is not None
        if self._is_updated:
            return
        for hook in self.hooks:
            hook.flush()
        with evaluation_pass(pl_module, loader):  # the memory's model may be a part of it
            if self.features is not None and self._reference is not None:
                features = _run_as_trainer(self.features, trainer, pl_module)
                realign(self.memory.model, self.heads, loader, features=features, reference=self._reference)
            self._log_changes(trainer, pl_module)
            if not self.update:
                return
            forward = _run_as_trainer(self._forward, trainer, pl_module)
            report = self.memory.update(loader, samples=self.samples, mask=self.mask, forward=forward)
        self._is_updated = True
        _log(trainer, collect_update(self.memory, report))

    def _log_changes(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.check and trainer.loggers and self._reference is not None:
            forward = _run_as_trainer(self._forward, trainer, pl_module)
            metrics = collect_changes(
                self.memory, self.check, forward=forward, mask=self.mask, reference=self._reference
            )
            _log(trainer, metrics)

    def _forward(self, batch: Any) -> Any:
        return (self.forward or make_forward(self.memory.model))(batch)


def _run_as_trainer(
    function: Callable[[Any], Any], trainer: Trainer, pl_module: LightningModule
) -> Callable[[Any], Any]:
    """Return the function with Lightning's batch conversion, device transfer and precision context around it."""

    def run(batch: Any) -> Any:
        batch = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
        with trainer.precision_plugin.forward_context():
            return function(trainer.strategy.batch_to_device(batch))

    return run


def _log(trainer: Trainer, metrics: dict[str, float]) -> None:
    # Lightning's self.log is not allowed when training or a validation ends.
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
