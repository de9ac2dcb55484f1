"""Bytes, passes and FLOPs of an update of large language models: ``python -m bench.plans`` prints a table.

The models are made from their configs on the meta device, so nothing is downloaded and no weight exists.
"""

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import sgp
from sgp.projection.plan import LayerPlan, Plan
from sgp.projection.sketch import ROWS_PER_PRODUCT

# Width, width inside the MLP, layers, heads, heads of keys and values.
MODELS = {
    "Llama-7B": (4096, 11008, 32, 32, 32),
    "Llama-13B": (5120, 13824, 40, 40, 40),
    "Llama-70B": (8192, 28672, 80, 64, 8),
}
TEXTS, TOKENS = 512, 512
# Test directions of a sketch, over the dimension.
WIDTHS = {"1/16": 16, "1/8": 8}


def make_model(width: int, inner: int, layers: int, heads: int, key_heads: int) -> LlamaForCausalLM:
    """Return a model on the meta device."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def plan(model: LlamaForCausalLM, gram: str) -> tuple[Plan, int]:
    """Return the plan of one pass over the texts, and the number of passes within the default budget."""
    settings = {"threshold": 0.95, "gram": gram, "exclude": ["lm_head", "*embed_tokens"]}
    memory = sgp.GradientMemory(model, **settings)  # type: ignore[arg-type]
    batch = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")}
    return memory.plan(TEXTS, batch, budget=2**62), memory.plan(TEXTS).passes


def plan_sketch(layers: list[LayerPlan], share: int) -> tuple[float, float]:
    """Return bytes, and FLOPs over those of a forward pass, of sketches with d / share test directions."""
    size = sum(4 * la.dimension * (2 * la.dimension // share + ROWS_PER_PRODUCT) for la in layers)
    flops = sum(4 * la.rows * la.dimension * la.dimension / share for la in layers)
    return size, flops / sum(la.forward for la in layers)


def main() -> None:
    """Print the table."""
    table = Table("model", "path", "GB in one pass", "passes in 2 GiB", "FLOPs / forward", box=None)
    for name, shape in MODELS.items():
        model = make_model(*shape)
        for gram in ("float64", "float32"):
            whole, passes = plan(model, gram)
            table.add_row(name, gram, f"{whole.bytes / 1e9:.1f}", str(passes), f"{whole.relative_flops:.2f}")
        for label, share in WIDTHS.items():
            size, flops = plan_sketch(whole.layers, share)
            table.add_row(name, f"sketch, {label} d", f"{size / 1e9:.1f}", "", f"{flops:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
