"""How each layer type shows its input as rows and its parameters as blocks.

A new layer type is one class with the decorator :func:`register_layer`::

    @register_layer(MyLinear)
    class MyLinearType(LayerType):
        def find_blocks(self, module):
            return [Block(weight="kernel", bias="offset", input_dim=0)]

Types are looked up along ``type(module).__mro__``, so a subclass is served by its parent's entry unless it has a
``forward`` of its own. A type of a library that need not be installed is registered by its qualified name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Block:
    """A slice of a module's parameter that meets one input: the unit that a subspace guards.

    Attributes:
        weight: name of the parameter inside its module.
        bias: name of the bias that is added to this block's output, if there is one.
        input: which of the module's inputs the block multiplies; a key of what :meth:`LayerType.find_inputs` returns.
        rows: first row of the slice along dimension 0 and one past its last, for parameters that pack several
            matrices.
        bias_rows: the same for the bias; None if it is cut as the weight is.
        groups: into how many independent matrices dimension 0 is divided.
        input_dim: the parameter's dimension that meets the input: 1 as in ``nn.Linear``, or 0.
    """

    weight: str
    bias: str | None = None
    input: str = "input"
    rows: tuple[int, int | None] = (0, None)
    bias_rows: tuple[int, int | None] | None = None
    groups: int = 1
    input_dim: int = 1

    def __post_init__(self) -> None:
        if self.input_dim == 0 and (self.rows != (0, None) or self.groups != 1):
            raise ValueError(f"block of {self.weight!r}: with input_dim=0 it must be the whole parameter, in one group")

    def count_inputs(self, weight: Tensor) -> int:
        """How many inputs each matrix of the block has."""
        return weight.shape[0] if self.input_dim == 0 else weight.shape[1:].numel()

    def view_matrix(self, weight: Tensor) -> Tensor:
        """The block of a weight, or of its like, as matrices [groups, out, inputs]: a view where possible."""
        if self.input_dim == 0:
            return weight.flatten(1).mT.unsqueeze(0)
        part = weight[slice(*self.rows)]
        return part.reshape(self.groups, part.shape[0] // self.groups, self.count_inputs(weight))

    def view_bias(self, bias: Tensor) -> Tensor:
        """The block of its bias: [groups, out]."""
        return bias[slice(*(self.bias_rows or self.rows))].reshape(self.groups, -1)

    def write_matrix(self, weight: Tensor, matrix: Tensor) -> None:
        """Put matrices [groups, out, inputs] back where :meth:`view_matrix` took them from."""
        if self.input_dim == 0:
            weight.copy_(matrix.squeeze(0).mT.reshape(weight.shape))
        else:
            part = weight[slice(*self.rows)]
            part.copy_(matrix.reshape(part.shape))

    def write_bias(self, bias: Tensor, vector: Tensor) -> None:
        """Put a vector [groups, out] back where :meth:`view_bias` took it from."""
        bias[slice(*(self.bias_rows or self.rows))].copy_(vector.flatten())

    def embed_matrix(self, matrix: Tensor, like: Tensor) -> Tensor:
        """A tensor like the parameter with these matrices in the block's place and 0 elsewhere; gradients flow."""
        if self.input_dim == 1 and self.rows == (0, None):
            return matrix.reshape(like.shape)
        whole = torch.zeros_like(like)
        self.write_matrix(whole, matrix)
        return whole

    def embed_bias(self, vector: Tensor, like: Tensor) -> Tensor:
        """The same for the bias. vector: [groups, out]"""
        whole = torch.zeros_like(like)
        self.write_bias(whole, vector)
        return whole


class LayerType:
    """What must be known of a layer type: its blocks, its inputs, and how an input unfolds into rows.

    All but :meth:`find_blocks` have defaults that suit every layer that multiplies the last dimension of its first
    argument.
    """

    # Whether the layer computes x W^T by torch.nn.functional.linear and nothing else, which the input side
    # needs.
    is_linear = False
    # Whether the layer looks its input up: an index stands for a one-hot row, and ``rows`` gives the indices.
    is_lookup = False

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        """Return the blocks of a module's parameters.

        Raises:
            TypeError: The module cannot be protected as it is configured. The memory adds its name to the message.
        """
        raise NotImplementedError

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        """The inputs of one call by name, each with the samples along dimension 0."""
        input = args[0] if args else kwargs["input"]
        return {"input": input.unsqueeze(0) if input.dim() == 1 else input}

    def find_mask(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return which positions the inputs of one call have, [samples, positions], or None if they have all.

        For layers whose arguments tell how long each sample is, such as lengths or a packed sequence. The mask applies
        to every input whose first two dimensions it has, and counts together with the mask of the batch.
        """
        return None

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        """An input as the rows that the weight multiplies: [groups, n, inputs]."""
        return input.reshape(1, -1, input.shape[-1])

    def get_sharing_key(self, module: nn.Module) -> Hashable:
        """What decides the rows of a tensor: modules that read the same one and agree in this see the same rows."""
        return "last dimension"

    def apply_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        """The positions of an input that a mask [samples, positions] admits; all if it has no such positions."""
        is_sequence = input.dim() > 2 and input.shape[:2] == mask.shape
        return input[mask] if is_sequence else input

    def is_sequence_first(self, input: Tensor, mask: Tensor) -> bool:
        """Whether an input has its positions along dimension 0 and its samples along dimension 1, by a mask [samples,
        positions]; False where there are as many of both."""
        return input.dim() > 2 and input.shape[:2] == mask.shape[::-1] != mask.shape


T = TypeVar("T", bound=type[LayerType])
_LAYER_TYPES: dict[type[nn.Module] | str, LayerType] = {}


def register_layer(*modules: type[nn.Module] | str) -> Callable[[T], T]:
    """Class decorator: serve these module types and their subclasses by the decorated :class:`LayerType`.

    Args:
        modules: the types, or their qualified names (``"package.module.Type"``), which import nothing.
    """

    def register(layer_type: T) -> T:
        for module in modules:
            _LAYER_TYPES[module] = layer_type()
        return layer_type

    return register


def get_layer_type(module: nn.Module) -> LayerType | None:
    """The entry that serves a module, or None.

    A subclass with a forward of its own may do anything to its input or its weight before they meet, so it is
    not served by its parent's entry: it can be registered itself.
    """
    for cls in type(module).__mro__:
        if not issubclass(cls, nn.Module):
            continue
        layer_type = _LAYER_TYPES.get(cls) or _LAYER_TYPES.get(f"{cls.__module__}.{cls.__qualname__}")
        if layer_type is not None:
            return layer_type if type(module).forward is cls.forward else None
    return None


@register_layer(nn.Linear)
class LinearType(LayerType):
    """``nn.Linear`` with any leading dimensions."""

    is_linear = True

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        return [Block("weight", "bias")]


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearType(LayerType):
    """GPT-2's linear layer, which calls itself a convolution: its weight is [inputs, outputs]."""

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        return [Block("weight", "bias", input_dim=0)]

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        return super().find_inputs(module, *(args or kwargs.values()))


@register_layer(nn.Embedding)
class EmbeddingType(LayerType):
    """``nn.Embedding``: a linear layer without bias on one-hot rows, of which only the index is ever there."""

    is_lookup = True

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        assert isinstance(module, nn.Embedding)
        # With max_norm the forward pass writes to the weight itself, which no step hook sees.
        return [Block("weight", input_dim=0)] if module.max_norm is None else []

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        input = args[0] if args else kwargs["input"]
        return {"input": input.unsqueeze(0) if input.dim() == 0 else input}

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        """The indices: [n]."""
        return input.flatten()

    def get_sharing_key(self, module: nn.Module) -> Hashable:
        assert isinstance(module, nn.Embedding)
        return "indices", module.num_embeddings

    def apply_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        return input[mask] if input.shape == mask.shape else input

    def is_sequence_first(self, input: Tensor, mask: Tensor) -> bool:
        return input.shape == mask.shape[::-1] != mask.shape


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvType(LayerType):
    """Convolutions: the rows are the patches under the kernel, one block per group."""

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return [Block("weight", "bias", groups=module.groups)]

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        input = args[0] if args else kwargs["input"]
        is_single = input.dim() == len(module.kernel_size) + 1
        return {"input": input.unsqueeze(0) if is_single else input}

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        spatial = len(module.kernel_size)
        # PyTorch's own resolution of numbers, "same" and "valid" into pads of every side, which is fixed when
        # the layer is made; with zeros it reads ``padding`` at every call, and people do change that.
        pads = module._reversed_padding_repeated_twice
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            pads = [pad for pad in reversed(module.padding) for _ in range(2)]
        if any(pads):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            input = F.pad(input, list(pads), mode=mode)
        patches = input
        for axis in range(spatial):
            size, step, gap = module.kernel_size[axis], module.stride[axis], module.dilation[axis]
            patches = patches.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
        # [n, channels, *positions, *kernel] -> [groups, n * positions, channels / groups * kernel]
        n, channels = patches.shape[:2]
        patches = patches.reshape(n, module.groups, channels // module.groups, *patches.shape[2:])
        positions = tuple(range(3, 3 + spatial))
        kernel = tuple(range(3 + spatial, 3 + 2 * spatial))
        width = channels // module.groups
        for size in module.kernel_size:
            width *= size
        return patches.permute(1, 0, *positions, 2, *kernel).reshape(module.groups, -1, width)

    def get_sharing_key(self, module: nn.Module) -> Hashable:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode

    def apply_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        # Dimension 1 is the channels, and a patch has no single position.
        return input

    def is_sequence_first(self, input: Tensor, mask: Tensor) -> bool:
        return False


@register_layer(nn.MultiheadAttention)
class MultiheadAttentionType(LayerType):
    """``nn.MultiheadAttention``: query, key, value and output projection.

    The three input projections share one subspace as long as they read the same tensor, as in self-attention.
    """

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        assert isinstance(module, nn.MultiheadAttention)
        width = module.embed_dim
        packed = module._qkv_same_embed_dim
        blocks = []
        for i, name in enumerate(("query", "key", "value")):
            weight = "in_proj_weight" if packed else f"{name[0]}_proj_weight"
            third = (i * width, (i + 1) * width)  # the bias is packed even where the weights are not
            blocks.append(
                Block(weight, "in_proj_bias", input=name, rows=third if packed else (0, None), bias_rows=third)
            )
        return [*blocks, Block("out_proj.weight", "out_proj.bias", input="attended")]

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.MultiheadAttention)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        attended = self._attended(module, *args, **kwargs)
        tensors = {name: named[name] for name in ("query", "key", "value")} | {"attended": attended}
        if attended.dim() == 2:  # one sequence without a batch dimension
            views = {id(tensor): tensor.unsqueeze(0) for tensor in tensors.values()}
        elif module.batch_first:
            return tensors
        else:
            views = {id(tensor): tensor.transpose(0, 1) for tensor in tensors.values()}
        # One view per tensor, so that what was the same tensor before still is.
        return {name: views[id(tensor)] for name, tensor in tensors.items()}

    def _attended(self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Tensor:
        """What the output projection multiplies: an identity in its place shows that.

        Hooks are left out: those that gather a sharded module's weights would scatter them again behind this call.
        """
        own = module.out_proj._parameters
        kept = dict(own)
        weight, bias = module.out_proj.weight, module.out_proj.bias
        try:
            own["weight"] = torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device)  # type: ignore[assignment]
            own["bias"] = None if bias is None else torch.zeros_like(bias)  # type: ignore[assignment]
            attended: Tensor = module.forward(*args, **kwargs)[0]
        finally:
            own.update(kept)
        return attended
