"""Tiny models of transformers and timm with random weights; nothing is downloaded."""

import copy
import importlib
import math
import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp.projection.tokens import TokenSubspace

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:(ViTEmbeddings|ConvNextLayer). unknown layer type")
Batch = dict[str, Tensor]


def make_text(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # The tasks have different words.
    words = torch.randint(20 * seed, 20 * (seed + 1), (3, 5), generator=generator)
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def make_pictures(seed: int, *, n: int = 2, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Low rank, as smooth images are, so that the patches leave free directions.
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


def albert() -> nn.Module:
    """Return a model of one layer that is called twice."""
    return transformers.AlbertModel(
        transformers.AlbertConfig(
            vocab_size=60,
            embedding_size=24,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
            initializer_range=0.1,
        ),
        add_pooling_layer=False,
    )


def llama() -> nn.Module:
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
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


def get_main_output(model: nn.Module, batch: Batch) -> Tensor:
    """Return the features of a batch in eval mode."""
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
        # Outputs of a norm layer have a fixed length, so only their direction can be learned.
        (outputs - torch.linspace(-1, 1, outputs.shape[-1])).square().mean().backward()
        optimizer.step()


MODELS = [
    pytest.param(bert, make_text, 1.0, 1e-4, id="bert"),
    pytest.param(albert, make_text, 1.0, 1e-4, id="albert"),
    pytest.param(llama, make_text, 1.0, 1e-4, id="llama"),
    pytest.param(vit, make_pictures, 1.0, 1e-4, id="vit"),
    pytest.param(resnet, make_pictures, 0.99, 0.1, id="resnet"),
    pytest.param(convnext, make_pictures, 0.999, 0.1, id="convnext"),
    pytest.param(low_rank_bert, make_text, 1.0, 1e-4, id="lora"),
]


# Layers with many different inputs are nearly full at these thresholds, as intended here.
@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize(("make", "data", "threshold", "share"), MODELS)
def test_training_on_a_second_task_hardly_changes_the_outputs_of_the_first(
    make: Callable[[], nn.Module], data: Callable[[int], Batch], threshold: float, share: float
) -> None:
    """``share`` is the largest drift relative to an unprotected copy."""
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
        old, new = get_main_output(trained, first), get_main_output(trained, second)
        torch.manual_seed(1)  # the same dropout for both
        train(trained, optimizer, second)
        drifts.append(float((get_main_output(trained, first) - old).norm() / old.norm()))
        gains.append(float((get_main_output(trained, second) - new).norm() / new.norm()))
    assert drifts[1] > 1e-2
    assert drifts[0] < share * drifts[1]
    assert gains[0] > max(1e-3, 3 * drifts[0])  # the second task is learned

    check = memory.check(first)
    assert check.leak < 1e-5
    assert check.drift < share  # of all outputs, not only the first
    assert {layer.layer for layer in check.layers} == set(memory.subspaces)
    # The drift of one layer changes the input of the next, so a little less is captured than at the update.
    assert all(layer.captured > 0.95 for layer in check.layers)
    assert list(model.state_dict()) == keys
    memory.update([second])
    assert memory.tasks == 2


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize(
    ("make", "data", "protected", "not_protected"),
    [
        pytest.param(
            bert,
            make_text,
            [
                "embeddings.word_embeddings",
                "encoder.layer.0.attention.self.query",
                "encoder.layer.1.output.dense",
                "pooler.dense",
            ],
            {"embeddings.LayerNorm.weight": "norm"},
            id="bert",
        ),
        pytest.param(
            vit,
            make_pictures,
            ["embeddings.patch_embeddings.projection", "pooler.dense"],
            {"embeddings.cls_token": "unknown layer type ViTEmbeddings", "layernorm.weight": "norm"},
            id="vit",
        ),
        pytest.param(
            resnet,
            make_pictures,
            ["resnet.embedder.embedder.convolution", "classifier.1"],
            {"resnet.embedder.embedder.normalization.weight": "norm"},
            id="resnet",
        ),
        pytest.param(
            convnext,
            make_pictures,
            ["encoder.stages.0.layers.0.dwconv", "encoder.stages.1.layers.0.pwconv2"],
            {"encoder.stages.0.layers.0.layernorm.weight": "norm"},
            id="convnext",
        ),
        pytest.param(
            low_rank_bert,
            make_text,
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
def test_the_summary_lists_protected_and_unprotected_parameters(
    make: Callable[[], nn.Module], data: Callable[[int], Batch], protected: list[str], not_protected: dict[str, str]
) -> None:
    torch.manual_seed(0)
    memory = sgp.GradientMemory(make(), threshold=0.95)
    memory.update([data(0)])
    capacity = memory.capacity()
    layers = {layer.layer: layer for layer in capacity.layers}
    assert set(protected) <= layers.keys()
    assert all(layers[name].bases > 0 for name in protected)
    assert not_protected.items() <= capacity.frozen.items()
    words = re.split(r"[,\s]+", str(memory.summary()))
    listed = [name for name, reason in not_protected.items() if not reason.startswith("not trained")]
    for name in [*protected, *listed]:
        assert any(fnmatch(name, word) for word in words), name


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_fused_experts_and_routers_give_one_warning_with_their_share(kind: str) -> None:
    settings = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, **settings, **attention
    )
    model = getattr(transformers, f"{kind}Model")(config)
    if not any(type(module).__name__ == f"{kind}Experts" for module in model.modules()):
        pytest.skip("before transformers 5 experts are linear layers, which are protected")
    with pytest.warns(UserWarning, match="unknown layer types") as found:
        memory = sgp.GradientMemory(model, threshold=0.9)
    frozen = [name for name, reason in memory.capacity().frozen.items() if reason.startswith("unknown layer type")]
    share = sum(model.get_parameter(name).numel() for name in frozen) / sum(p.numel() for p in model.parameters())
    assert [str(warning.message).partition(", which")[0] for warning in found] == [
        f"{kind}Experts, {kind}TopKRouter: unknown layer types, with {share:.1%} of all parameters"
    ]
    assert len(frozen) == 6  # of each layer: the router and two matrices of the experts
    assert found[0].filename == __file__


def test_a_lora_model_protects_its_adapters_only() -> None:
    memory = sgp.GradientMemory(low_rank_bert(), threshold=0.95, strict=True)
    names = [layer.layer for layer in memory.capacity().layers]
    assert len(names) == 8  # two layers, query and value, down and up
    assert all(".lora_A." in name or ".lora_B." in name for name in names)


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
def test_a_full_lora_adapter_does_not_leak() -> None:
    # Its input has few dimensions, which are all blocked: the weight may change by rounding only.
    torch.manual_seed(0)
    model = low_rank_bert(rank=4)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    memory.update([make_text(0)])
    full = [layer.layer for layer in memory.capacity().layers if layer.free == 0]
    assert full == [name for name in memory.subspaces if ".lora_B." in name]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    memory.attach(optimizer)
    before = {name: model.get_parameter(f"{name}.weight").detach().clone() for name in full}
    train(model, optimizer, make_text(1))
    for name, weight in before.items():
        now = model.get_parameter(f"{name}.weight").detach()
        assert float((now - weight).norm() / weight.norm()) < 1e-5
    assert memory.check(make_text(0)).leak < 1e-5


def test_an_output_layer_that_shares_its_embedding_is_protected_from_both_sides() -> None:
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
    layers = {layer.layer for layer in memory.capacity().layers}
    assert {"cls.predictions.decoder", "bert.embeddings.word_embeddings"} <= layers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory.attach(optimizer)
    memory.update([make_text(0)])
    before, others = get_main_output(model, make_text(0)), get_main_output(model, make_text(1))
    words = model.bert.embeddings.word_embeddings.weight.detach().clone()
    train(model, optimizer, make_text(1))
    assert float((get_main_output(model, make_text(1)) - others).norm() / others.norm()) > 0.1
    assert float((get_main_output(model, make_text(0)) - before).norm() / before.norm()) < 1e-4
    moved = (model.bert.embeddings.word_embeddings.weight.detach() - words).norm(dim=1)
    used = torch.zeros(60, dtype=torch.bool).index_fill(0, make_text(0)["input_ids"].flatten(), True)
    assert moved[used].max() < 1e-6 < moved[~used].min()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config)


def test_gpt2s_transposed_layers_are_protected() -> None:
    torch.manual_seed(0)
    model = gpt2()
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory.attach(optimizer)
    memory.update([make_text(0)], forward=lambda batch: model(**batch, use_cache=False))
    assert {"wte", "wpe", "h.0.attn.c_attn", "h.0.mlp.c_proj"} <= memory.subspaces.keys()
    before, others = get_main_output(model, make_text(0)), get_main_output(model, make_text(1))
    train(model, optimizer, make_text(1))
    learned = float((get_main_output(model, make_text(1)) - others).norm())
    assert learned > 0.1
    assert float((get_main_output(model, make_text(0)) - before).norm()) < 1e-4 * learned


def test_query_key_and_value_share_bases_and_the_summary_lists_them() -> None:
    torch.manual_seed(0)
    memory = sgp.GradientMemory(bert(), threshold=0.9)
    memory.update([make_text(0), make_text(1)])
    memory.update([make_text(2)])
    names = [f"encoder.layer.0.attention.self.{part}" for part in ("query", "key", "value")]
    assert len({id(memory.subspaces[name]) for name in names}) == 1
    assert memory.subspaces["encoder.layer.1.attention.self.query"] is not memory.subspaces[names[0]]
    kinds = [name.replace(".0.", ".*.") for name in names]
    assert ",".join(kinds) + "(2times)" in "".join(str(memory.summary()).split())
    again = sgp.GradientMemory(memory.model, threshold=0.9)
    again.load_state_dict(memory.state_dict())
    assert len({id(again.subspaces[name]) for name in names}) == 1


def test_gate_and_up_share_one_set_of_bases() -> None:
    torch.manual_seed(0)
    memory = sgp.GradientMemory(llama(), threshold=0.9)
    memory.update([make_text(0), make_text(1)])
    for names in (("mlp.gate_proj", "mlp.up_proj"), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
        assert len({id(memory.subspaces[f"layers.0.{name}"]) for name in names}) == 1
    assert memory.subspaces["layers.0.mlp.down_proj"] is not memory.subspaces["layers.0.mlp.gate_proj"]


def make_padded(batch: Batch, length: int = 11) -> Batch:
    missing = length - batch["input_ids"].shape[1]
    return {
        "input_ids": nn.functional.pad(batch["input_ids"], (0, missing), value=59),
        "attention_mask": nn.functional.pad(batch["attention_mask"], (0, missing)),
    }


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    model = bert()
    spaces = []
    for batches in ([make_text(0), make_text(1)], [make_padded(make_text(0)), make_padded(make_text(1))]):
        memory = sgp.GradientMemory(model, threshold=0.9)
        memory.update(batches)
        spaces.append(memory.subspaces)
    for name, plain in spaces[0].items():
        other = spaces[1][name]
        assert plain.rank.tolist() == other.rank.tolist(), name
        if isinstance(plain, TokenSubspace):
            assert list_importances(plain) == list_importances(other), name
            continue
        projectors = [(s.basis * s.importance.unsqueeze(1)) @ s.basis.mT for s in (plain, other)]
        torch.testing.assert_close(*projectors, atol=1e-4, rtol=0)


def list_importances(space: Any) -> dict[int, float]:
    return dict(zip(space.tokens.tolist(), space.importance[0].tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize("samples", [None, 3, 8])
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_positions_count_once_for_every_sentence_however_these_are_batched(
    make: Callable[[], nn.Module], is_padded: bool, samples: int | None
) -> None:
    # BERT and GPT-2 look their positions up once for the whole batch.
    torch.manual_seed(0)
    model = make()
    words = torch.randint(0, 60, (8, 6))
    lengths = torch.tensor([2, 6, 3, 3, 5, 1, 4, 4]) if is_padded else torch.full((8,), 6)
    mask = (torch.arange(6) < lengths.unsqueeze(1)).long()
    whole = {"input_ids": words, "attention_mask": mask} if is_padded else {"input_ids": words}
    name = next(name for name, _ in model.named_modules() if name.endswith(("position_embeddings", "wpe")))
    found = []
    for size in (8, 1, 5):
        memory = sgp.GradientMemory(model, threshold=1.0, alpha=1.0)
        cut = zip(*(torch.split(value, size) for value in whole.values()), strict=True)
        memory.update([dict(zip(whole, part, strict=True)) for part in cut], samples=samples)
        found.append(list_importances(memory.subspaces[name]))
    assert found[0] == found[1] == found[2]
    counts = mask[:samples].sum(0)
    root = (counts / counts.max()).sqrt()
    expected = {i: float(2 * r / (1 + r)) for i, r in enumerate(root) if r > 0}  # importance at alpha = 1
    assert found[0] == pytest.approx(expected)


def test_positions_that_all_sentences_share_count_if_one_of_them_has_them() -> None:
    # BERT looks its positions up once for the whole batch, whose first sentence may be the shortest.
    torch.manual_seed(0)
    batch = make_padded(make_text(0))
    batch["attention_mask"][0, 2:] = 0
    memory = sgp.GradientMemory(bert(), threshold=1.0)
    memory.update([batch])
    assert sorted(memory.subspaces["embeddings.position_embeddings"].tokens.tolist()) == [0, 1, 2, 3, 4]


def test_a_given_mask_selects_positions() -> None:
    torch.manual_seed(0)
    model = bert()
    ranks = []
    for mask in (None, lambda batch: batch["attention_mask"], lambda batch: torch.ones_like(batch["attention_mask"])):
        memory = sgp.GradientMemory(model, threshold=0.95)
        memory.update([make_padded(make_text(0))], mask=mask)
        ranks.append({name: int(space.rank) for name, space in memory.subspaces.items()})
    assert ranks[0] == ranks[1]
    assert ranks[2]["encoder.layer.1.output.dense"] > ranks[0]["encoder.layer.1.output.dense"]


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(lambda batch: (batch, torch.zeros(3)), id="tuple with labels"),
        pytest.param(lambda batch: [batch, {"labels": torch.zeros(3)}], id="list with a dict of labels"),
    ],
)
def test_padding_does_not_count_where_the_dict_is_packed_with_labels(pack: Callable[[Batch], Any]) -> None:
    torch.manual_seed(0)
    model = bert()
    plain, packed = (sgp.GradientMemory(model, threshold=0.9) for _ in range(2))
    plain.update([make_padded(make_text(0))])
    packed.update([pack(make_padded(make_text(0)))], forward=lambda batch: model(**batch[0]))
    for name, space in plain.subspaces.items():
        assert all(
            torch.equal(a, b)
            for a, b in zip(space.state_dict().values(), packed.subspaces[name].state_dict().values(), strict=True)
        ), name


def test_the_mask_of_one_batch_in_a_list_does_not_apply_to_the_others() -> None:
    torch.manual_seed(0)
    model = bert()
    short, long = make_padded(make_text(0)), make_text(1) | {"input_ids": make_padded(make_text(1))["input_ids"]}
    long["attention_mask"] = torch.ones_like(long["input_ids"])
    memory = sgp.GradientMemory(model, threshold=1.0)
    memory.update([[short, long]], forward=lambda batch: [model(**part) for part in batch])
    assert len(memory.subspaces["embeddings.position_embeddings"].tokens) == 11


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (lambda batch: batch["attention_mask"].tolist(), TypeError, r"mask must give a tensor .* it gave a list"),
        (lambda batch: batch["attention_mask"].unsqueeze(-1), ValueError, r"shape \(3, 5, 1\).*: it must be"),
        (lambda batch: batch["attention_mask"][0], ValueError, r"shape \(5,\).*: it must be \[samples, positions\]"),
        (lambda batch: batch["attention_mask"][:2], ValueError, r"shape \(2, 5\) for tensors of \[3, 3\] samples"),
        (lambda batch: batch["attention_mask"].mT, ValueError, r"shape \(5, 3\) for tensors of \[3, 3\] samples"),
    ],
)
def test_a_mask_that_fits_no_batch_is_refused_and_nothing_changes(
    mask: Callable[[Batch], Any], error: type[Exception], message: str
) -> None:
    memory = sgp.GradientMemory(bert(), threshold=0.95)
    with pytest.raises(error, match=message):
        memory.update([make_text(0)], mask=mask)
    with pytest.raises(error, match=message):
        memory.plan(10, make_text(0), mask=mask)
    assert memory.tasks == 0


def test_layers_whose_positions_are_all_masked_out_are_named() -> None:
    memory = sgp.GradientMemory(bert(), threshold=0.9)
    with pytest.warns(
        UserWarning, match=r"no input reached .*encoder\.layer\.0\.attention\.self\.query.*mask excluded"
    ):
        memory.update([make_text(0)], mask=lambda batch: torch.zeros_like(batch["attention_mask"]))
    assert set(memory.subspaces) == {"pooler.dense"}  # the only layer without positions


def test_a_mask_need_not_fit_every_layer() -> None:
    memory = sgp.GradientMemory(bert(), threshold=0.9)
    memory.update([make_text(0)], mask=lambda batch: torch.zeros(3, 4))  # the texts have five words
    assert len(memory.subspaces) == len(memory.capacity().layers)


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
    first, second = (make_pictures(seed, size=32)["pixel_values"] for seed in (0, 1))
    memory.update([first])
    for _ in range(20):
        optimizer.zero_grad()
        model(second).square().mean().backward()
        optimizer.step()
    assert memory.check(first).leak < 1e-5
    assert memory.check(first).drift < 1e-4
