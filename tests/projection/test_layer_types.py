"""Rows and blocks of a layer type reproduce the computation of the layer."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from sgp.projection import layer_types
from sgp.projection.layer_types import Block, LayerType, get_layer_type, register_layer

# PyTorch warns once per process, if an example happens to have such a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
many = settings(max_examples=150, deadline=None, derandomize=True)
few = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def convolutions(draw: st.DrawFn, *, with_free_space: bool = False) -> tuple[nn.Module, Tensor]:
    """Return a drawn convolution and an input; ``with_free_space`` gives fewer patches than their dimension."""
    spatial = draw(st.integers(1, 3))
    per_axis = range(spatial)
    kernel = tuple(draw(st.integers(1, 3)) for _ in per_axis)
    dilation = tuple(draw(st.integers(1, 2)) for _ in per_axis)
    groups = draw(st.integers(1, 3))
    padding: Any = draw(st.sampled_from(["numbers", "same", "valid"]))
    stride = (1,) * spatial if padding == "same" else tuple(draw(st.integers(1, 3)) for _ in per_axis)
    if padding == "numbers":
        padding = tuple(draw(st.integers(0, 2)) for _ in per_axis)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    span = [gap * (size - 1) + 1 for gap, size in zip(dilation, kernel, strict=True)]
    # Long enough for the kernel, and for a reflection, which must be shorter than the input.
    size = [s + draw(st.integers(0, 1 if with_free_space else 2)) for s in span]
    size = [max(s, 3 if mode == "reflect" else 2) for s in size]
    n = draw(st.integers(1, 1 if with_free_space else 3))
    channels = draw(st.integers(1, 3))
    if with_free_space:
        probe = CONVOLUTIONS[spatial](1, 1, kernel, stride, padding, dilation, padding_mode=mode)
        channels += probe(torch.zeros(1, 1, *size)).numel() // math.prod(kernel)
    conv = CONVOLUTIONS[spatial](
        channels * groups,
        draw(st.integers(1, 3)) * groups,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        draw(st.booleans()),
        mode,
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(n, channels * groups, *size)
    nn.init.normal_(conv.weight)
    return conv, x[0] if n == 1 and draw(st.booleans()) else x


def compute_output_by_blocks(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Return rows @ matrix^T + vector of each block by the name of its input, [groups, n, out]."""
    layer_type = get_layer_type(module)
    assert layer_type is not None
    inputs = layer_type.find_inputs(module, *args, **kwargs)
    products = {}
    for block in layer_type.find_blocks(module):
        product = (
            layer_type.unfold_rows(module, inputs[block.input])
            @ block.view_matrix(module.get_parameter(block.weight)).mT
        )
        owner, _, leaf = (block.bias or "").rpartition(".")
        bias = getattr(module.get_submodule(owner), leaf) if block.bias else None
        products[block.input] = product if bias is None else product + block.view_bias(bias).unsqueeze(1)
    return products


def reshape_to_grouped_rows(output: Tensor, groups: int, *, spatial: int) -> Tensor:
    """Return a convolution's output [(n,) channels, *positions] as [groups, n * positions, channels / groups]."""
    output = output if output.dim() == spatial + 2 else output.unsqueeze(0)
    rows = output.movedim(1, -1)
    return rows.reshape(-1, groups, rows.shape[-1] // groups).transpose(0, 1)


@many
@given(convolutions())
def test_patches_times_the_kernels_of_a_convolution_are_its_output(case: tuple[nn.Conv2d, Tensor]) -> None:
    conv, x = case
    conv, x = conv.double(), x.double()
    expected = reshape_to_grouped_rows(conv(x), conv.groups, spatial=len(conv.kernel_size))
    torch.testing.assert_close(compute_output_by_blocks(conv, x)["input"], expected)


def test_patches_follow_a_padding_that_was_set_after_construction() -> None:
    # Segmentation libraries replace strides by dilations in an existing network in this way.
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    conv.stride, conv.dilation, conv.padding = (1, 1), (2, 2), (2, 2)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(
        compute_output_by_blocks(conv, x)["input"], reshape_to_grouped_rows(conv(x), 1, spatial=2)
    )


@few
@given(st.lists(st.integers(1, 3), max_size=4), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_rows_times_the_weight_of_a_linear_layer_are_its_output(
    leading: list[int], inputs: int, outputs: int, bias: bool, by_keyword: bool
) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias).double()
    x = torch.randn(*leading, inputs, dtype=torch.float64)
    found = compute_output_by_blocks(linear, input=x) if by_keyword else compute_output_by_blocks(linear, x)
    torch.testing.assert_close(found["input"][0], linear(x).reshape(-1, outputs))


@st.composite
def attentions(draw: st.DrawFn) -> tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return a drawn attention layer, its three inputs and its masks."""
    heads, width = draw(st.sampled_from([(1, 4), (2, 4), (2, 6)]))
    batch_first, batched = draw(st.booleans()), draw(st.booleans())
    kind = draw(st.sampled_from(["self", "cross", "separate"]))
    kdim, vdim = draw(st.sampled_from([(3, 5), (width, 5), (3, 3)])) if kind == "separate" else (width, width)
    attention = nn.MultiheadAttention(
        width, heads, bias=draw(st.booleans()), batch_first=batch_first, kdim=kdim, vdim=vdim
    ).double()
    torch.manual_seed(draw(st.integers(0, 99)))
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    n, length = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    memory = length if kind == "self" else draw(st.integers(1, 4))

    def sequence(steps: int, size: int) -> Tensor:
        x = torch.randn(n, steps, size, dtype=torch.float64)
        return x[0] if not batched else x if batch_first else x.transpose(0, 1)

    if kind == "self":
        tensors = (sequence(length, width),) * 3
    elif kind == "cross":
        tensors = (sequence(length, width),) + (sequence(memory, width),) * 2
    else:
        tensors = (sequence(length, width), sequence(memory, kdim), sequence(memory, vdim))
    masks: dict[str, Any] = {}
    # The first key stays visible: a query without visible keys has no output.
    if draw(st.booleans()):
        masks["attn_mask"] = torch.rand(length, memory) < 0.5
        masks["attn_mask"][:, 0] = False
    if draw(st.booleans()):
        hidden = torch.rand(n, memory) < 0.5
        hidden[:, 0] = False
        masks["key_padding_mask"] = hidden if batched else hidden[0]
    return attention, tensors, masks


@many
@given(attentions())
def test_rows_of_query_key_value_and_attended_times_their_blocks_are_the_output_of_attention(
    case: tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor], dict[str, Any]],
) -> None:
    attention, tensors, masks = case
    output = attention(*tensors, **masks)[0]
    products = compute_output_by_blocks(attention, *tensors, **masks)
    batched = output.dim() == 3
    n = 1 if not batched else output.shape[0 if attention.batch_first else 1]

    expected = output.unsqueeze(0) if not batched else output if attention.batch_first else output.transpose(0, 1)
    torch.testing.assert_close(products["attended"][0], expected.reshape(-1, attention.embed_dim))

    def per_head(name: str) -> Tensor:
        return products[name][0].reshape(n, -1, attention.num_heads, attention.head_dim).transpose(1, 2)

    query, key, value = map(per_head, ("query", "key", "value"))
    seen = torch.ones(n, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    if "attn_mask" in masks:
        seen &= ~masks["attn_mask"]
    if "key_padding_mask" in masks:
        seen &= ~masks["key_padding_mask"].reshape(n, 1, 1, -1)
    by_hand = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)
    layer_type = get_layer_type(attention)
    attended = layer_type.find_inputs(attention, *tensors, **masks)["attended"]
    torch.testing.assert_close(attended, by_hand)


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.5}])
def test_attended_rows_are_right_with_the_rarer_options_of_attention(extra: dict[str, Any]) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, **extra).double().eval()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    output = attention(x, x, x, need_weights=False)[0]
    products = compute_output_by_blocks(attention, query=x, key=x, value=x, need_weights=False)
    torch.testing.assert_close(products["attended"][0], output.reshape(-1, 4))


def test_inputs_that_are_the_same_tensor_stay_the_same_tensor() -> None:
    for attention in (nn.MultiheadAttention(4, 2, batch_first=True), nn.MultiheadAttention(4, 2)):
        for x, memory in ((torch.randn(2, 3, 4), torch.randn(2, 3, 4)), (torch.randn(3, 4), torch.randn(5, 4))):
            inputs = get_layer_type(attention).find_inputs(attention, x, x, x)
            assert inputs["query"] is inputs["key"] is inputs["value"]
            inputs = get_layer_type(attention).find_inputs(attention, x, memory, memory)
            assert inputs["query"] is not inputs["key"]
            assert inputs["key"] is inputs["value"]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Block, Tensor]:
    """Return a drawn block and the parameter that it is a slice of."""
    spatial = draw(st.lists(st.integers(1, 3), max_size=3))
    width = draw(st.integers(1, 4))
    torch.manual_seed(0)
    if draw(st.booleans()):
        return Block("w", input_dim=0), torch.randn(width, draw(st.integers(1, 4)), *spatial)
    groups, out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    weight = torch.randn(before + groups * out + after, width, *spatial)
    if len(spatial) == 2 and draw(st.booleans()):
        weight = weight.contiguous(memory_format=torch.channels_last)
    end = draw(st.sampled_from([None, before + groups * out])) if after == 0 else before + groups * out
    return Block("w", rows=(before, end), groups=groups), weight


@many
@given(blocks())
def test_a_written_block_can_be_read_and_nothing_else_changes(case: tuple[Block, Tensor]) -> None:
    block, weight = case
    original = weight.clone()
    matrix = block.view_matrix(weight)
    assert matrix.dim() == 3
    new = torch.randn_like(matrix)
    block.write_matrix(weight, new)
    torch.testing.assert_close(block.view_matrix(weight), new, rtol=0, atol=0)
    assert weight.stride() == original.stride()
    if block.input_dim == 1:
        outside = torch.ones(len(weight), dtype=torch.bool)
        outside[slice(*block.rows)] = False
        assert torch.equal(weight[outside], original[outside])
    block.write_matrix(weight, block.view_matrix(original))
    assert torch.equal(weight, original)


def test_a_matrix_has_its_input_on_the_last_dimension() -> None:
    weight = torch.arange(24.0).reshape(2, 3, 4)
    by_rows = Block("w").view_matrix(weight)
    by_columns = Block("w", input_dim=0).view_matrix(weight)
    assert by_rows.shape == (1, 2, 12)
    assert by_columns.shape == (1, 12, 2)
    assert torch.equal(by_rows[0], by_columns[0].mT)
    assert Block("w", groups=2).view_matrix(weight).shape == (2, 1, 12)


def test_the_bias_has_the_rows_of_the_weight_unless_it_is_packed_in_another_way() -> None:
    bias = torch.arange(6.0)
    assert Block("w", "b", rows=(2, 4)).view_bias(bias).tolist() == [[2, 3]]
    assert Block("w", "b", bias_rows=(4, 6)).view_bias(bias).tolist() == [[4, 5]]
    assert Block("w", "b", groups=3).view_bias(bias).tolist() == [[0, 1], [2, 3], [4, 5]]
    view = Block("w", "b", rows=(2, 4), groups=2).view_bias(bias)
    view.zero_()
    assert bias.tolist() == [0, 1, 0, 0, 4, 5]


class TransposedLinear(nn.Module):
    """A layer of a user, with the input on dimension 0 as in GPT-2's Conv1D."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs))
        self.offset = nn.Parameter(torch.randn(outputs))

    def forward(self, features: Tensor) -> Tensor:
        return features @ self.kernel + self.offset


class Gated(nn.Module):
    """Two matrices packed in one parameter, both on the same input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.packed = nn.Parameter(torch.randn(2 * outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = F.linear(x, self.packed).chunk(2, dim=-1)
        return gate.sigmoid() * value


@pytest.fixture
def restore_layer_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the layer types that a test has registered."""
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    @register_layer(TransposedLinear)
    class TransposedLinearType(LayerType):
        def find_blocks(self, module: nn.Module) -> Sequence[Block]:
            return [Block("kernel", "offset", input_dim=0)]

        def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            return {"input": args[0] if args else kwargs["features"]}

    @register_layer(Gated)
    class GatedType(LayerType):
        def find_blocks(self, module: nn.Module) -> Sequence[Block]:
            assert isinstance(module, Gated)
            n = module.outputs
            return [Block("packed", rows=(0, n)), Block("packed", rows=(n, 2 * n))]


@pytest.mark.usefixtures("restore_layer_types")
def test_the_decorator_returns_the_class_and_registers_the_users_type() -> None:
    assert sgp.register_layer is register_layer
    assert isinstance(get_layer_type(Gated(2, 3)), LayerType)

    @register_layer(nn.Bilinear, nn.Embedding)
    class Anything(LayerType):
        pass

    assert isinstance(Anything(), LayerType)
    assert type(get_layer_type(nn.Bilinear(1, 1, 1))) is Anything
    assert type(get_layer_type(nn.Embedding(1, 1))) is Anything


def test_layer_types_are_looked_up_along_the_ancestors_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    class Child(nn.Linear):
        pass

    class Grandchild(Child):
        pass

    assert get_layer_type(Grandchild(2, 2)) is get_layer_type(nn.Linear(2, 2))
    assert get_layer_type(nn.BatchNorm1d(2)) is None
    assert get_layer_type(nn.ConvTranspose2d(1, 1, 1)) is None

    @register_layer(Child)
    class ChildType(LayerType):
        pass

    assert type(get_layer_type(Grandchild(2, 2))) is ChildType
    assert type(get_layer_type(nn.Linear(2, 2))) is not ChildType


may_be_nearly_full = pytest.mark.filterwarnings("ignore:.*can hardly learn")


def assert_a_step_leaves_the_outputs_of_remembered_inputs(
    layer: nn.Module, *args: Tensor, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any
) -> None:
    """Assert that training on other inputs changes every weight but not the outputs for remembered inputs."""

    def run(inputs: Sequence[Tensor]) -> Tensor:
        output = layer(*inputs, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    memory = sgp.GradientMemory(layer, threshold=1.0, alpha=math.inf)
    steps = optimizer(layer.parameters(), lr=0.05)
    memory.attach(steps)
    memory.update([args], forward=run)
    assert all(bool((s.importance.sum(-1) == s.rank).all()) for s in memory.subspaces.values())
    assert all(int(s.rank.min()) > 0 and s.free > 0 for s in memory.subspaces.values())

    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    new = {id(x): torch.randn_like(x) for x in args}
    others = [new[id(x)] for x in args]
    with torch.no_grad():
        outputs, outputs_of_others = run(args), run(others)
    for _ in range(3):
        steps.zero_grad()
        run(others).square().mean().backward()
        steps.step()
    with torch.no_grad():
        moved, learned = run(args) - outputs, run(others) - outputs_of_others
    assert float(learned.norm() / outputs_of_others.norm()) > 1e-3
    assert float(moved.norm()) < 1e-5 * float(outputs.norm() + learned.norm())
    for protected in memory.layers.values():
        name, block = protected.weight.name, protected.block
        old, now = (block.view_matrix(weight) for weight in (weights[name], layer.get_parameter(name)))
        assert not torch.equal(old, now), f"{protected.name} did not learn"


@may_be_nearly_full
@few
@given(convolutions(with_free_space=True), st.sampled_from([torch.optim.SGD, torch.optim.AdamW]))
def test_a_step_leaves_the_outputs_of_a_convolution_for_remembered_inputs_unchanged(
    case: tuple[nn.Module, Tensor], optimizer: type[torch.optim.Optimizer]
) -> None:
    conv, x = case
    assert_a_step_leaves_the_outputs_of_remembered_inputs(conv, x, optimizer=optimizer)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(4, 3, 1), (8, 6, 2), (5, 10, 5)])
def test_a_step_leaves_the_outputs_of_dense_grouped_and_depthwise_convolutions_in_either_memory_format(
    inputs: int,
    outputs: int,
    groups: int,
    optimizer: type[torch.optim.Optimizer],
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, 3, groups=groups).to(memory_format=memory_format)
    assert conv.weight.is_contiguous(memory_format=memory_format)
    assert_a_step_leaves_the_outputs_of_remembered_inputs(conv, torch.randn(1, inputs, 4, 4), optimizer=optimizer)


@few
@given(
    st.lists(st.integers(1, 2), max_size=3),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([torch.optim.SGD, torch.optim.AdamW]),
)
def test_a_step_leaves_the_outputs_of_a_linear_layer_for_remembered_inputs_unchanged(
    leading: list[int], outputs: int, bias: bool, optimizer: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(10, outputs, bias=bias)
    assert_a_step_leaves_the_outputs_of_remembered_inputs(linear, torch.randn(*leading, 10), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "separate"])
@pytest.mark.parametrize("shape", ["sequence first", "batch first", "unbatched"])
def test_a_step_leaves_the_outputs_of_attention_for_remembered_inputs_unchanged(
    shape: str, kind: str, bias: bool, optimizer: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    kdim, vdim = (10, 12) if kind == "separate" else (16, 16)
    attention = nn.MultiheadAttention(16, 2, bias=bias, kdim=kdim, vdim=vdim, batch_first=shape == "batch first").eval()

    def sequence(size: int) -> Tensor:
        return torch.randn(*([] if shape == "unbatched" else [2]), 3, size)

    query = sequence(16)
    if kind == "self":
        tensors = (query, query, query)
    elif kind == "cross":
        tensors = (query, *(sequence(16),) * 2)
    else:
        tensors = (query, sequence(kdim), sequence(vdim))
    assert_a_step_leaves_the_outputs_of_remembered_inputs(attention, *tensors, optimizer=optimizer, need_weights=False)


@pytest.mark.usefixtures("restore_layer_types")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("layer", [TransposedLinear, Gated])
def test_a_step_leaves_the_outputs_of_a_users_layer_for_remembered_inputs_unchanged(
    layer: type[nn.Module], optimizer: type[torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    assert_a_step_leaves_the_outputs_of_remembered_inputs(layer(10, 4), torch.randn(2, 3, 10), optimizer=optimizer)


def test_a_block_with_the_input_on_dimension_0_is_the_whole_parameter() -> None:
    with pytest.raises(ValueError, match="whole parameter"):
        Block("weight", rows=(0, 4), input_dim=0)


def test_an_embedded_block_is_surrounded_by_zeros() -> None:
    attention = nn.MultiheadAttention(4, 2)
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    for number, block in enumerate(layer_types.MultiheadAttentionType().find_blocks(attention)[:3]):
        matrix = torch.randn(1, 4, 4).requires_grad_()
        whole = block.embed_matrix(matrix, weight)
        assert torch.equal(block.view_matrix(whole), matrix)
        assert int((whole.detach() != 0).any(dim=1).sum()) == 4
        (gradient,) = torch.autograd.grad(whole.sum(), matrix)
        assert torch.equal(gradient, torch.ones_like(matrix))
        vector = torch.ones(1, 4)
        assert block.embed_bias(vector, bias).view(3, 4).sum(1).tolist() == [4.0 * (i == number) for i in range(3)]
    conv = nn.Conv2d(4, 6, 3, groups=2)
    (block,) = layer_types.ConvType().find_blocks(conv)
    assert torch.equal(block.embed_matrix(block.view_matrix(conv.weight), conv.weight), conv.weight)
    turned = Block("weight", input_dim=0)
    table = torch.randn(5, 3)
    assert torch.equal(turned.embed_matrix(turned.view_matrix(table), table), table)
