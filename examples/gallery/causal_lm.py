"""Teach a language model something new.

A small language model has learned English: a Llama of three layers that reads bytes, trained here on the texts of
Python's own manual. Now it is fine-tuned on additions. What it can do is protected without any of the texts that it was
trained on: the model generates texts itself (`sgp.calibrate`), and the memory protects the directions that these use in
each layer. Embeddings and the output layer are protected as well.

The score is the loss in bits per byte, so lower is better. Protection has a price here: in the same number of steps,
the additions are learned less well. With a real model, the same few lines are used:
[Keep a pretrained model's abilities](../../docs/keep-abilities.md).
"""

import copy
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import sgp
from examples.gallery.figure import draw

PRETRAINING, STEPS, EVERY, LENGTH = 400, 60, 10, 96
tokenizer = ByT5Tokenizer(extra_ids=0)


def encode(text: str) -> Tensor:
    """Return rows of tokens, [n, LENGTH]."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def write_additions(seed: int) -> Tensor:
    """Return rows of additions, such as ``17+25=42;``."""
    numbers = torch.randint(100, (3000, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return encode("".join(f"{a}+{b}={a + b};" for a, b in numbers))


ENGLISH = encode(" ".join("".join(topics.values()).split())[:400_000])
HELD_OUT = {"English": ENGLISH[:64], "additions": write_additions(seed=3)[:64]}


@torch.no_grad()
def test(model: nn.Module) -> list[float]:
    """Return the loss on English and on additions, in bits per byte."""
    model.eval()
    return [model(input_ids=rows, labels=rows).loss.item() / math.log(2) for rows in HELD_OUT.values()]


def train(
    model: nn.Module, rows: Tensor, steps: int, lr: float, memory: sgp.GradientMemory | None = None
) -> list[list[float]]:
    """Train a model, and return the losses before and after every ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if memory is not None:
        memory.attach(optimizer)
    scores = [test(model)]
    for step in range(1, steps + 1):
        model.train()
        batch = rows[torch.randint(len(rows), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            scores.append(test(model))
    return scores


def pretrain() -> nn.Module:
    """Return a model that is trained on English."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    train(model, ENGLISH[64:], PRETRAINING, lr=3e-3)
    return model


def fine_tune(model: nn.Module, protect: bool) -> list[list[float]]:
    """Fine-tune a model on additions, and return the losses before and after every ten steps."""
    memory = None
    if protect:
        memory = sgp.GradientMemory(model, threshold=0.95, alpha=10)
        memory.update(sgp.calibrate(model, tokenizer, texts=64, length=LENGTH))
    torch.manual_seed(3)
    return train(model, write_additions(seed=2), STEPS, lr=1e-3, memory=memory)


if __name__ == "__main__":
    base = pretrain()
    draw(
        "causal_lm",
        {name: fine_tune(copy.deepcopy(base), name == "SGP") for name in ("finetuning", "SGP")},
        tasks={"English": (0, 0), "additions": (0, STEPS // EVERY)},
        score="loss (bits per byte)",
        time="ten steps each",
        decimals=2,
    )
