"""Ways to fine-tune a pretrained model that are compared in what it learns and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

import sgp
from bench.smollm2.measure import compute_loss

Batch = dict[str, Tensor]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Settings:
    """Settings of all methods; each uses its own.

    Attributes:
        threshold: Of GPM, SGP and the control.
        alpha: Of SGP and the control.
        every: Steps whose change is projected at once.
        rank: Of LoRA.
        preserved: Share of singular directions that OSF keeps.
        strength: Of EWC's penalty.
        share: Of calibration texts in replay, or of the base weights in interpolation.
    """

    threshold: float = 0.95
    alpha: float = 10.0
    every: int = 8
    rank: int = 16
    preserved: float = 0.5
    strength: float = 1000.0
    share: float = 0.1


class Finetune:
    """Train all weights. The other methods override what they do otherwise.

    Args:
        model: Pretrained model.
        calibration: Batches of text that the model has sampled.
        settings: Settings of all methods.
        cache: File for what was computed from the calibration text alone.
    """

    def __init__(self, model: nn.Module, calibration: list[Batch], settings: Settings, cache: Path) -> None:
        self.model = model
        self.calibration = calibration
        self.settings = settings
        self.cache = cache

    def begin_task(self) -> None:
        """Prepare the model for the next task."""

    def attach(self, optimizer: Optimizer) -> None:
        """Act on every step of a task's optimizer."""

    def mix(self, batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
        """Yield the training batches of a task."""
        yield from batches

    def compute_penalty(self) -> Tensor | None:
        """Return what is added to the loss of a step."""
        return None

    def end_steps(self) -> None:
        """Bring the weights to where the method wants them after the last step of a task."""

    def end_task(self, batches: Sequence[Batch]) -> None:
        """Update the method's state before another task."""

    def finish(self) -> None:
        """Change the weights after the last task."""

    def count_bytes(self) -> int:
        """Return the bytes that the method keeps between tasks beside the model."""
        return 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class Frozen(Finetune):
    """Train nothing."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return []


class FrozenNorms(Finetune):
    """Train all weights but those of norm layers, as a memory does."""

    def begin_task(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("norm" not in name)


class Interpolation(Finetune):
    """Go a share of the way back to the base weights after the last task."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._base = [parameter.detach().clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def finish(self) -> None:
        for parameter, base in zip(self.model.parameters(), self._base, strict=True):
            parameter.lerp_(base, self.settings.share)

    def count_bytes(self) -> int:
        return sum(base.nbytes for base in self._base)


class Replay(Finetune):
    """Put calibration texts into a share of the places of each batch."""

    def mix(self, batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
        texts = torch.cat([batch["input_ids"] for batch in self.calibration])
        generator = random.Random(seed)
        for batch in batches:
            tokens, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
            for row in range(len(tokens)):
                if generator.random() < self.settings.share:
                    start = generator.randrange(texts.shape[1] - tokens.shape[1] + 1)
                    tokens[row] = texts[generator.randrange(len(texts)), start : start + tokens.shape[1]]
                    mask[row] = 1
            yield {"input_ids": tokens, "attention_mask": mask}

    def count_bytes(self) -> int:
        return sum(batch["input_ids"].nbytes for batch in self.calibration)


class EWC(Finetune):
    """Penalize changes of weights by their Fisher information, of calibration text first and of each task later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        file = self.cache.with_name(f"{self.cache.stem}-fisher.safetensors")
        self._anchor = [parameter.detach().clone() for parameter in self.parameters]
        if file.is_file():
            found = load_file(file)
            self._fisher = [found[str(index)] for index in range(len(self.parameters))]
            return
        self._fisher = [torch.zeros_like(parameter) for parameter in self.parameters]
        self._add_fisher(self.calibration)
        save_file({str(index): fisher for index, fisher in enumerate(self._fisher)}, file)

    def compute_penalty(self) -> Tensor | None:
        terms = [
            (fisher * (parameter - anchor).square()).sum()
            for fisher, parameter, anchor in zip(self._fisher, self.parameters, self._anchor, strict=True)
        ]
        return self.settings.strength / 2 * torch.stack(terms).sum()

    def end_task(self, batches: Sequence[Batch]) -> None:
        self._add_fisher(batches)

    def count_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in [*self._fisher, *self._anchor])

    def _add_fisher(self, batches: Sequence[Batch]) -> None:
        """Add the mean over texts of the squared gradient of a text's log-likelihood."""
        texts = [(ids[None], mask[None]) for batch in batches for ids, mask in zip(*batch.values(), strict=True)]
        for ids, mask in texts:
            self.model.zero_grad()
            tokens = int(mask[:, 1:].sum())
            compute_loss(self.model, {"input_ids": ids, "attention_mask": mask}).backward()  # type: ignore[no-untyped-call]
            for fisher, parameter in zip(self._fisher, self.parameters, strict=True):
                if parameter.grad is not None:
                    # Of a token: a text's gradient is the mean of those of its tokens.
                    fisher.addcmul_(parameter.grad, parameter.grad, value=tokens / len(texts))
        self.model.zero_grad()
        self._anchor = [parameter.detach().clone() for parameter in self.parameters]


class WithMemory(Finetune):
    """Base class of methods whose steps a memory projects."""

    memory: sgp.GradientMemory

    def attach(self, optimizer: Optimizer) -> None:
        self._hook = self.memory.attach(optimizer, every=self.settings.every)

    def end_steps(self) -> None:
        self._hook.detach()

    def end_task(self, batches: Sequence[Batch]) -> None:
        self.memory.update(batches)

    def count_bytes(self) -> int:
        bases = {id(bases): bases for bases in self.memory.subspaces.values()}
        return sum(each.nbytes for each in bases.values())


class SGP(WithMemory):
    """Project steps by a memory of the calibration text."""

    alpha: float | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory = self._make_memory()

    def _make_memory(self) -> sgp.GradientMemory:
        settings = self.settings
        alpha = settings.alpha if self.alpha is None else self.alpha
        file = self.cache.with_name(f"{self.cache.stem}-{settings.threshold}-{alpha}.safetensors")
        if file.is_file():
            return sgp.GradientMemory.from_file(self.model, file)
        memory = sgp.GradientMemory(self.model, threshold=settings.threshold, alpha=alpha)
        memory.update(self.calibration)
        memory.save(file)
        return memory


class GPM(SGP):
    """SGP with importances of 1."""

    alpha = math.inf


class RandomBases(SGP):
    """The control of SGP: random bases of the same ranks and importances."""

    def _make_memory(self) -> sgp.GradientMemory:
        memory = super()._make_memory()
        generator = torch.Generator().manual_seed(0)
        state = memory.state_dict()
        for entry in state["subspaces"]:
            if "basis" in entry:
                entry["basis"] = torch.linalg.qr(torch.randn(entry["basis"].shape, generator=generator)).Q
            else:  # of the embedding, whose bases are tokens
                chosen = torch.randperm(int(entry["size"]), generator=generator)[: len(entry["tokens"])]
                entry["tokens"] = chosen.sort().values
        memory.load_state_dict(state)
        return memory


class LoRA(Finetune):
    """Train low-rank adapters of PEFT, one for all tasks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.peft = import_module("peft")
        config = self.peft.LoraConfig(r=self.settings.rank, lora_alpha=2 * self.settings.rank, target_modules=LINEAR)
        self.adapted = self.peft.get_peft_model(self.model, config)

    def count_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


class LoRAMemory(WithMemory, LoRA):
    """A new adapter for each task whose update is projected by a memory of the calibration text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.settings
        self.memory = sgp.GradientMemory(
            self.adapted, threshold=settings.threshold, alpha=settings.alpha, exclude=["*.lora_B.*"]
        )
        file = self.cache.with_name(f"{self.cache.stem}-lora-{settings.threshold}-{settings.alpha}.safetensors")
        if file.is_file():
            self.memory.load(file)
        else:
            self.memory.update(self.calibration)
            self.memory.save(file)

    def begin_task(self) -> None:
        from sgp.integrations.peft import next_adapter

        next_adapter(self.adapted, self.memory)

    def count_bytes(self) -> int:
        return super().count_bytes() + LoRA.count_bytes(self)


class OSF(Finetune):
    """Train what is orthogonal to the strongest singular directions of each weight, by PEFT."""

    def begin_task(self) -> None:
        peft = import_module("peft")
        config = peft.OSFConfig(effective_rank=self.settings.preserved, target_modules=LINEAR)
        peft.inject_adapter_in_model(config, self.model)

    def end_task(self, batches: Sequence[Batch]) -> None:
        for name, layer in list(self.model.named_modules()):
            if hasattr(layer, "osf_svd_params"):
                layer.merge()
                parent, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, layer.get_base_layer())
        del self.model.peft_config
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)


METHODS: dict[str, Callable[..., Finetune]] = {
    "finetune": Finetune,
    "frozen": Frozen,
    "frozen-norms": FrozenNorms,
    "interpolation": Interpolation,
    "replay": Replay,
    "ewc": EWC,
    "sgp": SGP,
    "gpm": GPM,
    "random-bases": RandomBases,
    "lora": LoRA,
    "lora-memory": LoRAMemory,
    "osf": OSF,
}
