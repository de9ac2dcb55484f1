"""Calibration text of a language model, sampled from the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.batches import evaluation_pass


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    *,
    texts: int = 64,
    length: int = 96,
    batch: int = 16,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[dict[str, Tensor]]:
    """Sample text from a pretrained language model, for the update that protects what the model can do.

    What a model writes resembles what it was trained on, so no training data are needed::

        memory = sgp.GradientMemory(model, threshold=0.95, alpha=10)
        memory.update(sgp.calibrate(model, tokenizer))
        memory.attach(optimizer)  # and fine-tune

    Each text begins with what the tokenizer puts before a text, if anything, and a random token of the vocabulary; the
    model continues it, in eval mode without gradients, and is left as it was. Equal seeds give equal texts on one
    device.

    Args:
        model: Causal language model of transformers: called with ``input_ids``, ``past_key_values`` and ``use_cache``
            it returns ``logits`` and ``past_key_values``. Without a cache (``past_key_values`` is None) it reads the
            text again for each token.
        tokenizer: Tokenizer of the model.
        texts: Number of texts.
        length: Number of tokens of each text.
        batch: Number of texts that are sampled at once, and of texts in each batch that is returned.
        temperature: Divisor of the logits, above 0; 1 samples from the model's own distribution.
        seed: Seed of the texts; torch's global random state is not used.

    Returns:
        Batches with ``input_ids`` and ``attention_mask``, [at most batch, length], on the model's device.
    """
    prefix = list(tokenizer("")["input_ids"])
    for name, value, least in (("texts", texts, 1), ("length", length, len(prefix) + 2), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    special = set(tokenizer.all_special_ids)
    words = torch.tensor([token for token in range(len(tokenizer)) if token not in special], device=device)
    batches = []
    with evaluation_pass(model, ()):
        for first in range(0, texts, batch):
            count = min(batch, texts - first)
            begun = words[torch.randint(len(words), (count, 1), generator=generator, device=device)]
            start = torch.tensor(prefix, dtype=torch.long, device=device).expand(count, -1)
            tokens = _sample(model, torch.cat([start, begun], dim=1), length, temperature, generator)
            batches.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    return batches


def _sample(model: nn.Module, tokens: Tensor, length: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Return texts [n, begun] that the model continued to a length, [n, length]."""
    unread, cache = tokens, None
    while tokens.shape[1] < length:
        output = model(input_ids=unread, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        probabilities = (output.logits[:, -1].float() / temperature).softmax(-1)
        new = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
        unread = tokens if cache is None else new
    return tokens
