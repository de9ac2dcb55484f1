"""A memory in the ``Trainer`` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sgp import storage
from sgp.projection import GradientMemory, OptimizerHook
from sgp.projection.batches import evaluation_pass, get_mask, make_forward
from sgp.projection.modes import Mode

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ImportError('this needs transformers: pip install "sgp-torch[transformers]"', name="transformers") from error

# In each checkpoint folder. The first is what memory.save writes.
MEMORY = "memory.safetensors"
HANDLE = "memory_handle.safetensors"


class GradientMemoryCallback(TrainerCallback):
    """One training of a ``Trainer`` is one task::

        for task in tasks:
            Trainer(model, args, train_dataset=task, callbacks=[GradientMemoryCallback(memory)]).train()

    The memory is attached when training begins, and updated from the training data when it has ended. Each of the
    trainer's checkpoints holds it, and a training that is resumed from one ends with the same bits.

    Args:
        memory: of the trainer's model, or of a part of it.
        samples: how many inputs the update uses; None for all, as in ``memory.update``.
        mask: which positions count, as in ``memory.update``; the ``attention_mask`` without it.
        forward: runs one batch of the training data; the trainer's model does without it. It is tried when training
            begins, so that it does not fail after it; data that can only be streamed are not.
        update: False leaves the update to you, for instance because it should see other data.
        mode: as in ``memory.attach``.
        every: as in ``memory.attach``. An evaluation sees projected weights; the end of an epoch and a checkpoint
            project as well.
        checkpoint: the folder that training resumes from, where that is not in the trainer's ``output_dir``.
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
    ) -> None:
        self.memory = memory
        self.samples = samples
        self.mask = mask
        self.forward = forward
        self.update = update
        self.mode = mode
        self.every = every
        self.checkpoint = checkpoint
        self.hook: OptimizerHook | None = None
        self._evaluation = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Try what the update will need, attach, and go on from a checkpoint if the trainer does."""
        self._evaluation.close()  # of a training that an evaluation broke off
        if self.update:
            self._try(args, kwargs["model"], kwargs["train_dataloader"])
        self.hook = self.memory.attach(kwargs["optimizer"], mode=self.mode, every=self.every)
        if state.global_step > 0:
            folder = Path(self.checkpoint) if self.checkpoint else _folder(args, state)
            self._load(folder, self.hook)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training goes on from the weights that it had before an evaluation."""
        self._evaluation.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Project what an evaluation or a checkpoint will see. In all processes, of which one writes the file."""
        if self.hook is None:
            return
        # Whether to save the best may be known only after the evaluation.
        if control.should_save or (control.should_evaluate and args.save_strategy == "best"):
            self.hook.flush()
        elif control.should_evaluate:
            self._evaluation.enter_context(self.hook.projected())

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Project: other weights may be loaded after the last epoch."""
        self._evaluation.close()
        if self.hook is not None:
            self.hook.flush()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write memory and hook beside the trainer's own files."""
        if self.hook is None or not state.is_world_process_zero:
            return
        folder = _folder(args, state)
        hook = {"format": storage.FORMAT, "hook": self.hook.state_dict(), "weights": self._digest()}
        storage.write(folder / HANDLE, hook)
        self.memory.save(folder / MEMORY)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the task that was learned, and leave the optimizer as it was."""
        try:
            if self.update:
                self._update(kwargs["model"], kwargs["train_dataloader"])
        finally:
            if self.hook is not None:
                self.hook.detach()
                self.hook = None

    def _try(self, args: TrainingArguments, model: nn.Module, batches: DataLoader[Any]) -> None:
        from accelerate.utils import send_to_device  # the Trainer needs it, this module does not

        with evaluation_pass(model, batches):
            batch = _first_batch(batches, args.train_batch_size)
            if batch is not None:
                batch = send_to_device(batch, args.device)
                get_mask(batch, self.mask)
                (self.forward or make_forward(model))(batch)

    def _update(self, model: nn.Module, batches: DataLoader[Any]) -> None:
        if hasattr(batches, "set_epoch"):  # one order of the samples, in how many pieces ever the task was trained
            batches.set_epoch(0)
        forward = self.forward or make_forward(model)
        with evaluation_pass(model, batches):  # the memory's model may be a part of it
            self.memory.update(batches, samples=self.samples, mask=self.mask, forward=forward)

    def _load(self, folder: Path, hook: OptimizerHook) -> None:
        missing = [name for name in (HANDLE, MEMORY) if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"training resumes, and there is no {' and no '.join(missing)} in {str(folder)!r}: give "
                "GradientMemoryCallback(checkpoint=...) the folder it resumes from, or resume from an earlier one if "
                "this was not finished"
            )
        saved = storage.read(folder / HANDLE, "saved hook")
        if saved["weights"] != self._digest():
            raise ValueError(
                f"the memory in {str(folder)!r} was saved with other weights than the model has now: give "
                "GradientMemoryCallback(checkpoint=...) the folder that training resumes from"
            )
        self.memory.load(folder / MEMORY)
        hook.load_state_dict(saved["hook"])

    def _digest(self) -> str:
        """Tells the trained weights apart from those of other checkpoints."""
        return storage.digest({name: p.detach() for name, p in self.memory.model.named_parameters() if p.requires_grad})


def _first_batch(batches: DataLoader[Any], size: int) -> Any:
    """The first samples of a loader's data, as it would make a batch of them.

    Neither its sampler nor its workers are asked, which would remember it. None if the data cannot be had by number.
    """
    data: Any = batches.dataset
    if isinstance(data, IterableDataset):
        return None
    try:
        if batches.batch_sampler is None:  # what the data hold is batches
            samples = data[0]
        elif hasattr(data, "__getitems__"):
            samples = data.__getitems__(list(range(min(size, len(data)))))
        else:
            samples = [data[index] for index in range(min(size, len(data)))]
    except (LookupError, TypeError):  # other keys than numbers; if the data are at fault, training will tell
        return None
    return batches.collate_fn(samples)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the trainer writes the checkpoint of this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
