"""Callback for the ``Trainer`` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sgp import storage
from sgp.heads import realign
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
from sgp.projection.batches import evaluation_pass, get_mask, make_forward
from sgp.projection.modes import Mode

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ImportError('this needs transformers: pip install "sgp-torch[transformers]"', name="transformers") from error

# Files in each checkpoint folder: the file of memory.save, and the state of the hook.
MEMORY = "memory.safetensors"
HOOK = "memory_hook.safetensors"


class GradientMemoryCallback(TrainerCallback):
    """Callback that protects earlier tasks while a ``Trainer`` trains the next one; each ``train`` is one task.

    ::

        for task in tasks:
            Trainer(model, args, train_dataset=task, callbacks=[GradientMemoryCallback(memory)]).train()

    The memory is attached when training begins, and updated from the training data when it ends. It is saved in each
    checkpoint of the trainer, and a resumed training ends with the same bits.

    Args:
        memory: Memory of the trainer's model or of a part of it.
        samples: Number of inputs that the update uses; None for all, as in ``memory.update``.
        mask: Function that returns which positions count, as in ``memory.update``; None for the ``attention_mask``.
        forward: Function that runs one batch of the training data; None to run the trainer's model. It is tried on one
            batch before training, so that it does not fail after it, unless the data can only be streamed.
        update: Whether to update the memory; if False, call ``memory.update`` yourself, for instance with other data.
        mode: Projection mode, as in ``memory.attach``.
        every: Number of steps that are projected at once, as in ``memory.attach``. An evaluation sees projected
            weights; the end of an epoch and a checkpoint also project.
        checkpoint: Folder that training resumes from, if it is outside the trainer's ``output_dir``.
        heads: Heads of earlier tasks, which are realigned to the moved features before the update
            (:func:`sgp.heads.realign`).
        features: Function that returns the inputs of the heads for a batch of the training data.
        log: ``trainer.log``, which receives free capacity and captured energy of each group of layers when training
            begins and ends; None to log nothing.
        check: Batches of earlier tasks, on which leak and drift since the last update are measured and logged at each
            evaluation and at the end of training. A batch costs three forward passes.

    Raises:
        TypeError: ``check`` is a single batch.
        ValueError: ``heads`` is passed without ``features``, or ``check`` without ``log``.
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
        checkpoint: str | Path | None = None,
        heads: Heads = (),
        features: Callable[[Any], Tensor] | None = None,
        log: Callable[[dict[str, float]], None] | None = None,
        check: Iterable[Any] = (),
    ) -> None:
        self.memory = memory
        self.samples = samples
        self.mask = mask
        self.forward = forward
        self.update = update
        self.mode = mode
        self.every = every
        self.checkpoint = checkpoint
        self.heads = list_heads(heads, features)
        self.features = features
        self.log = log
        self.check = list_batches(check)
        if self.check and log is None:
            raise ValueError("check= needs log=, the function that logs leak and drift: pass log=trainer.log")
        self.hook: OptimizerHook | None = None
        self._reference: Anchor | None = None
        self._evaluation = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run one batch as the update will, attach the memory, and resume from a checkpoint if the trainer does."""
        self._evaluation.close()  # left open if an evaluation of an earlier training failed
        if self.update:
            self._try_forward(args, kwargs["model"], kwargs["train_dataloader"])
        self.hook = self.memory.attach(kwargs["optimizer"], mode=self.mode, every=self.every)
        self._reference = None
        if state.global_step > 0:
            folder = Path(self.checkpoint) if self.checkpoint else _folder(args, state)
            self._load(folder, self.hook)
        self._reference = self._reference or find_reference(self.memory, self.heads, self.check)
        if self.log is not None:
            self.log(collect_capacity(self.memory))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the weights of training after an evaluation."""
        self._evaluation.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Project the weights for an evaluation or a checkpoint, in all processes, of which one writes the file."""
        if self.hook is None:
            return
        # Whether this checkpoint is the best one may be known only after the evaluation.
        if control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            self.hook.flush()
        elif control.should_evaluate:
            self._evaluation.enter_context(self.hook.projected())

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log leak and drift of the projected weights."""
        if self.hook is not None:  # otherwise the evaluation is not part of a training
            self._log_changes(kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project the pending change, since other weights may be loaded after the last epoch."""
        self._evaluation.close()
        if self.hook is not None:
            self.hook.flush()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write memory and hook to the folder of the trainer's checkpoint."""
        if self.hook is None or not state.is_world_process_zero:
            return
        folder = _folder(args, state)
        hook = {"format": storage.FORMAT, "hook": self.hook.state_dict(), "weights": self._digest()}
        storage.write(folder / HOOK, hook | {"reference": dump_reference(self._reference)})
        self.memory.save(folder / MEMORY)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Realign the heads of earlier tasks, update the memory, and detach it from the optimizer."""
        try:
            self._end_task(kwargs["model"], kwargs["train_dataloader"])
        finally:
            self._reference = None
            if self.hook is not None:
                self.hook.detach()
                self.hook = None

    def _try_forward(self, args: TrainingArguments, model: nn.Module, batches: DataLoader[Any]) -> None:
        from accelerate.utils import send_to_device  # the Trainer needs it, this module does not

        with evaluation_pass(model, batches):
            batch = _first_batch(batches, args.train_batch_size)
            if batch is not None:
                batch = send_to_device(batch, args.device)
                get_mask(batch, self.mask)
                (self.forward or make_forward(model))(batch)

    def _end_task(self, model: nn.Module, batches: DataLoader[Any]) -> None:
        if hasattr(batches, "set_epoch"):  # the same order of the samples, whether training was resumed or not
            batches.set_epoch(0)
        with evaluation_pass(model, batches):  # the memory's model may be a part of it
            if self.features is not None and self._reference is not None:
                realign(self.memory.model, self.heads, batches, features=self.features, reference=self._reference)
            self._log_changes(model)
            if not self.update:
                return
            forward = self.forward or make_forward(model)
            report = self.memory.update(batches, samples=self.samples, mask=self.mask, forward=forward)
        if self.log is not None:
            self.log(collect_update(self.memory, report))

    def _log_changes(self, model: nn.Module) -> None:
        if self.log is None or not self.check or self._reference is None:
            return
        forward = self.forward or make_forward(model)
        self.log(collect_changes(self.memory, self.check, forward=forward, mask=self.mask, reference=self._reference))

    def _load(self, folder: Path, hook: OptimizerHook) -> None:
        missing = [name for name in (HOOK, MEMORY) if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"training resumes, but {' and '.join(missing)} is missing in {str(folder)!r}: pass the folder that it "
                "resumes from, GradientMemoryCallback(checkpoint=...); if it is incomplete, resume from an earlier one"
            )
        saved = storage.read(folder / HOOK, "saved hook")
        if saved["weights"] != self._digest():
            raise ValueError(
                f"the memory in {str(folder)!r} was saved with other weights than the model has now: pass the folder "
                "that training resumes from, GradientMemoryCallback(checkpoint=...)"
            )
        self.memory.load(folder / MEMORY)
        hook.load_state_dict(saved["hook"])
        self._reference = load_reference(saved.get("reference"))

    def _digest(self) -> str:
        """Return a digest of the trained weights, which differs between checkpoints."""
        return storage.digest({name: p.detach() for name, p in self.memory.model.named_parameters() if p.requires_grad})


def _first_batch(batches: DataLoader[Any], size: int) -> Any:
    """Return a batch of the first samples of a loader's dataset, or None if samples cannot be indexed by number.

    The sampler and the workers of the loader are not used, since that would change their state.
    """
    data: Any = batches.dataset
    if isinstance(data, IterableDataset):
        return None
    try:
        if batches.batch_sampler is None:  # each item of the dataset is a batch
            samples = data[0]
        elif hasattr(data, "__getitems__"):
            samples = data.__getitems__(list(range(min(size, len(data)))))
        else:
            samples = [data[index] for index in range(min(size, len(data)))]
    except (LookupError, TypeError):  # keys may be of another type; if the dataset is faulty, training will raise
        return None
    return batches.collate_fn(samples)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the trainer's checkpoint of this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
