"""Calibration text that a tiny causal language model samples from itself."""

from typing import Any

import pytest
import torch
from torch import nn

import sgp

transformers = pytest.importorskip("transformers")


class Tokenizer:
    """Thirty tokens, of which the first two are special; each text begins with the prefix."""

    all_special_ids = (0, 1)

    def __init__(self, prefix: tuple[int, ...] = ()) -> None:
        self.prefix = prefix

    def __len__(self) -> int:
        return 30

    def __call__(self, text: str) -> dict[str, list[int]]:
        assert text == ""
        return {"input_ids": list(self.prefix)}


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def sample(model: nn.Module, tokenizer: Tokenizer | None = None, **options: Any) -> torch.Tensor:
    batches = sgp.calibrate(model, tokenizer or Tokenizer(), texts=5, length=7, batch=2, **options)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 1]
    assert all((batch["attention_mask"] == 1).all() for batch in batches)
    return torch.cat([batch["input_ids"] for batch in batches])


def test_equal_seeds_give_equal_texts_and_other_seeds_others() -> None:
    model = language_model()
    texts = sample(model, seed=3)
    assert texts.shape == (5, 7)
    assert torch.equal(texts, sample(model, seed=3))
    assert not torch.equal(texts, sample(model, seed=4))


def test_a_text_begins_with_the_prefix_of_the_tokenizer_and_a_token_that_is_not_special() -> None:
    texts = sample(language_model(), Tokenizer(prefix=(1, 5)))
    assert texts[:, :2].tolist() == [[1, 5]] * 5
    assert all(2 <= token < 30 for token in texts[:, 2].tolist())
    assert len(set(texts[:, 2].tolist())) > 1


def test_at_a_low_temperature_the_most_likely_token_follows() -> None:
    model = language_model().eval()
    texts = sample(model, temperature=1e-4)
    with torch.no_grad():
        likeliest = model(input_ids=texts).logits.argmax(-1)
    assert torch.equal(likeliest[:, :-1], texts[:, 1:])


def test_a_model_without_a_cache_samples_the_same() -> None:
    class Uncached(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, past_key_values: None, use_cache: bool) -> Any:
            return self.inner(input_ids=input_ids, use_cache=False)

    model = language_model()
    assert torch.equal(sample(Uncached(model)), sample(model))


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model = language_model().train()
    state = torch.get_rng_state()
    sample(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_memory_takes_the_batches() -> None:
    model = language_model()
    memory = sgp.GradientMemory(model, threshold=0.9)
    memory.update(sgp.calibrate(model, Tokenizer(), texts=4, length=6))
    assert memory.tasks == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("texts", 0), ("length", 1), ("batch", 0), ("temperature", 0.0), ("temperature", float("inf"))],
)
def test_an_option_that_makes_no_sense_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        sgp.calibrate(language_model(), Tokenizer(), **{option: value})
