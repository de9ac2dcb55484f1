"""Models of libraries that people use, tiny and with random weights: nothing is fetched."""

import copy
import importlib
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import sgp

transformers = pytest.importorskip("transformers")
Batch = dict[str, Tensor]


def text(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Each task has words of its own.
    words = torch.randint(20 * seed, 20 * (seed + 1), (3, 5), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def pictures(seed: int, *, n: int = 2, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Low rank, as smooth pictures are, so that the patches leave room.
    axes = [torch.randn(n, 3, 2, size, generator=generator).cumsum(-1) / 2 for _ in range(2)]
    return {"pixel_values": torch.einsum("ncrh,ncrw->nchw", *axes)}


def bert() -> nn.Module:
    return transformers.BertModel(
        transformers.BertConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=16,
            initializer_range=0.1,
        )
    )


def vit() -> nn.Module:
    return transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=8,
        )
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=4
        )
    )


def convnext() -> nn.Module:
    return transformers.ConvNextModel(
        transformers.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4)
    )


def low_rank_bert(rank: int = 20) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=["query", "value"], init_lora_weights=False)
    return peft.get_peft_model(bert(), config)


def main_output(model: nn.Module, batch: Batch) -> Tensor:
    """The features of a batch in eval mode."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        outputs = model.eval()(**batch)
    for module, training in modes.items():
        module.training = training
    return outputs[0].clone()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = 20) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(**batch)[0]
        # Outputs behind a norm layer have a fixed length; what can be learned is where they point.
        (outputs - torch.linspace(-1, 1, outputs.shape[-1])).square().mean().backward()
        optimizer.step()


MODELS = [
    pytest.param(bert, text, 1.0, 1e-4, id="bert"),
    pytest.param(vit, pictures, 1.0, 1e-4, id="vit"),
    pytest.param(resnet, pictures, 0.99, 0.1, id="resnet"),
    pytest.param(convnext, pictures, 0.999, 0.1, id="convnext"),
    pytest.param(low_rank_bert, text, 1.0, 1e-4, id="lora"),
]


# The layers that see most are nearly full at these thresholds, which is what they are for here.
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize(("make", "data", "threshold", "share"), MODELS)
def test_training_on_a_second_task_hardly_moves_the_outputs_of_the_first(
    make: Callable[[], nn.Module], data: Callable[[int], Batch], threshold: float, share: float
) -> None:
    """``share``: how much of the unprotected copy's drift may be left."""
    torch.manual_seed(0)
    model = make()
    first, second = data(0), data(1)
    keys = list(model.state_dict())
    memory = sgp.GradientMemory(model, threshold=threshold, alpha=math.inf)
    warm_up = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    train(model, warm_up, first, steps=2)
    memory.update([first])
    copied = copy.deepcopy(model)

    drifts, gains = [], []
    for trained, is_attached in ((model, True), (copied, False)):
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-3)
        if is_attached:
            memory.attach(optimizer)
        old, new = main_output(trained, first), main_output(trained, second)
        torch.manual_seed(1)  # the same dropout for both
        train(trained, optimizer, second)
        drifts.append(float((main_output(trained, first) - old).norm() / old.norm()))
        gains.append(float((main_output(trained, second) - new).norm() / new.norm()))
    assert drifts[1] > 1e-2
    assert drifts[0] < share * drifts[1]
    assert gains[0] > max(1e-3, 3 * drifts[0])  # the second task is learned all the same

    check = memory.check(first)
    assert check.leak < 1e-5
    assert check.drift < share  # of all outputs, not only the first
    assert {layer.layer for layer in check.layers} == set(memory.subspaces)
    # What drifted in one layer is the input of the next, so a little less is held than at the update.
    assert all(layer.held > 0.95 for layer in check.layers)
    assert list(model.state_dict()) == keys
    memory.update([second])
    assert memory.tasks == 2


def summary(memory: sgp.GradientMemory) -> str:
    output = io.StringIO()
    memory.summary(Console(file=output, width=200))
    return output.getvalue()


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize(
    ("make", "data", "guarded", "not_guarded"),
    [
        pytest.param(
            bert,
            text,
            ["encoder.layer.0.attention.self.query", "encoder.layer.1.output.dense", "pooler.dense"],
            {"embeddings.word_embeddings.weight": "unsupported layer type Embedding"},
            id="bert",
        ),
        pytest.param(
            vit,
            pictures,
            ["embeddings.patch_embeddings.projection", "pooler.dense"],
            {"embeddings.cls_token": "unsupported layer type ViTEmbeddings", "layernorm.weight": "norm"},
            id="vit",
        ),
        pytest.param(
            resnet,
            pictures,
            ["resnet.embedder.embedder.convolution", "classifier.1"],
            {"resnet.embedder.embedder.normalization.weight": "norm"},
            id="resnet",
        ),
        pytest.param(
            convnext,
            pictures,
            ["encoder.stages.0.layers.0.dwconv", "encoder.stages.1.layers.0.pwconv2"],
            {"encoder.stages.0.layers.0.layernorm.weight": "norm"},
            id="convnext",
        ),
        pytest.param(
            low_rank_bert,
            text,
            [f"base_model.model.encoder.layer.0.attention.self.query.lora_{x}.default" for x in "AB"],
            {
                "base_model.model.encoder.layer.0.attention.self.query.base_layer.weight": (
                    "not trained (requires_grad is False)"
                )
            },
            id="lora",
        ),
    ],
)
def test_the_summary_names_what_is_guarded_and_what_is_not(
    make: Callable[[], nn.Module], data: Callable[[int], Batch], guarded: list[str], not_guarded: dict[str, str]
) -> None:
    torch.manual_seed(0)
    memory = sgp.GradientMemory(make(), threshold=0.95)
    memory.update([data(0)])
    capacity = memory.capacity()
    layers = {layer.layer: layer for layer in capacity.layers}
    assert set(guarded) <= layers.keys()
    assert all(layers[name].bases > 0 for name in guarded)
    assert not_guarded.items() <= capacity.frozen.items()
    text = "".join(summary(memory).split())
    for name in [*guarded, *not_guarded]:
        assert name in text


def test_a_low_rank_model_guards_its_corrections_and_nothing_else() -> None:
    memory = sgp.GradientMemory(low_rank_bert(), threshold=0.95, strict=True)
    names = [layer.layer for layer in memory.capacity().layers]
    assert len(names) == 8  # two layers, query and value, down and up
    assert all(".lora_A." in name or ".lora_B." in name for name in names)


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
def test_a_correction_of_low_rank_that_is_full_leaks_nothing() -> None:
    # Its input has few dimensions, all of them blocked: the weight may move by rounding and no more.
    torch.manual_seed(0)
    model = low_rank_bert(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([text(0)])
    full = [layer.layer for layer in memory.capacity().layers if layer.free == 0]
    assert full == [name for name in memory.subspaces if ".lora_B." in name]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    memory.attach(optimizer)
    before = {name: model.get_parameter(f"{name}.weight").detach().clone() for name in full}
    train(model, optimizer, text(1))
    for name, weight in before.items():
        now = model.get_parameter(f"{name}.weight").detach()
        assert float((now - weight).norm() / weight.norm()) < 1e-5
    assert memory.check(text(0)).leak < 1e-5


def test_a_language_models_output_layer_that_shares_its_embedding_is_not_said_to_be_guarded() -> None:
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    assert "cls.predictions.decoder" not in {layer.layer for layer in memory.capacity().layers}
    why = memory.capacity().frozen["bert.embeddings.word_embeddings.weight"]
    assert why == "unsupported layer type Embedding, which shares it"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory.attach(optimizer)
    memory.update([text(0)])
    before = main_output(model, text(0))
    train(model, optimizer, text(1))
    assert float((main_output(model, text(0)) - before).norm() / before.norm()) < 1e-4


def test_gpt2s_transposed_layers_need_one_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pytorch_utils import Conv1D

    from sgp.projection import layers

    monkeypatch.setattr(layers, "_LAYER_TYPES", layers._LAYER_TYPES.copy())
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    model = transformers.GPT2Model(config)
    with pytest.raises(ValueError, match="register_layer"):
        sgp.GradientMemory(model, threshold=0.9)

    @sgp.register_layer(Conv1D)
    class Conv1DType(sgp.LayerType):
        def blocks(self, module: nn.Module) -> list[sgp.Block]:
            return [sgp.Block("weight", "bias", input_dim=0)]

        def inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            return {"input": args[0] if args else kwargs["x"]}

    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory.attach(optimizer)
    memory.update([text(0)], forward=lambda batch: model(**batch, use_cache=False))
    before, others = main_output(model, text(0)), main_output(model, text(1))
    train(model, optimizer, text(1))
    learned = float((main_output(model, text(1)) - others).norm())
    assert learned > 0.1
    assert float((main_output(model, text(0)) - before).norm()) < 1e-4 * learned


def test_a_timm_model_is_protected() -> None:
    for library in ("torchvision", "timm"):
        try:
            importlib.import_module(library)
        except Exception as error:  # a torchvision of another build fails with a RuntimeError
            pytest.skip(f"timm needs torchvision, and {library} cannot be imported here: {error}")
    timm = importlib.import_module("timm")
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=4
    )
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory.attach(optimizer)
    first, second = (pictures(seed, size=32)["pixel_values"] for seed in (0, 1))
    memory.update([first])
    for _ in range(20):
        optimizer.zero_grad()
        model(second).square().mean().backward()
        optimizer.step()
    assert memory.check(first).leak < 1e-5
    assert memory.check(first).drift < 1e-4
