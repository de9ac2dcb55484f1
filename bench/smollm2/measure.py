"""Losses on texts and accuracy on prompts of a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.smollm2.tasks import Prompt, PromptTask, pad_texts

# Prompts that run through the model at once.
AT_ONCE = 32


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of all tokens of a batch but the first of each text."""
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weights = mask[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def measure_loss(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    """Return the mean loss over the tokens of batches."""
    model.eval()
    weights = [int(batch["attention_mask"][:, 1:].sum()) for batch in batches]
    losses = [float(compute_loss(model, batch)) * weight for batch, weight in zip(batches, weights, strict=True)]
    return sum(losses) / sum(weights)


@torch.no_grad()
def measure_answers(model: nn.Module, task: PromptTask, prompts: Sequence[Prompt]) -> tuple[float, float]:
    """Return the accuracy, by the likeliest answer, and the mean loss of the right answer among all tokens."""
    model.eval()
    right, loss = 0, 0.0
    prompts = sorted(prompts, key=lambda prompt: len(prompt[0]))  # less padding
    for first in range(0, len(prompts), AT_ONCE):
        chosen = prompts[first : first + AT_ONCE]
        batch = pad_texts([tokens for tokens, _ in chosen])
        wanted = torch.tensor([answer for _, answer in chosen])
        logits = _compute_last_logits(model, batch)
        right += int((logits[:, task.answers].argmax(1) == wanted).sum())
        loss += float(F.cross_entropy(logits, task.answers[wanted], reduction="sum"))
    return right / len(prompts), loss / len(prompts)


def _compute_last_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits after the last token of each text, [n, vocabulary]."""
    last = batch["attention_mask"].sum(1) - 1
    positions = torch.unique(last)
    logits = model(**batch, use_cache=False, logits_to_keep=positions).logits
    result: Tensor = logits[torch.arange(len(last)), torch.searchsorted(positions, last)]
    return result
