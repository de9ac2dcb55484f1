"""How each layer type shows its input as rows and its parameters as blocks.

A new layer type is one class with the decorator :func:`register_layer`::

    @register_layer(MyLinear)
    class MyLinearType(LayerType):
        def find_blocks(self, module):
            return [Block(weight="kernel", bias="offset", input_dim=0)]

Types are looked up along ``type(module).__mro__``, so the layer type of a module also applies to its subclasses, unless
they override ``forward``. A type of a library that may not be installed is registered by its qualified name.
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
    """A slice of a module's parameter that multiplies one input: the unit that a subspace protects.

    Attributes:
        weight: Name of the parameter inside its module.
        bias: Name of the bias that is added to this block's output; None if there is none.
        input: Input of the module that the block multiplies; a key of what :meth:`LayerType.find_inputs` returns.
        rows: First row of the slice along dimension 0 and one past its last, for parameters that pack several
            matrices.
        bias_rows: Rows of the bias; None if they are those of the weight.
        groups: Number of independent matrices into which dimension 0 is divided.
        input_dim: Dimension of the parameter that the input is contracted with: 1 as in ``nn.Linear``, or 0.
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
        """Return the input dimension of each matrix of the block."""
        return weight.shape[0] if self.input_dim == 0 else weight.shape[1:].numel()

    def view_matrix(self, weight: Tensor) -> Tensor:
        """Return the block of a weight, or of a tensor of its shape, as matrices: a view where possible.

        Returns:
            Tensor of shape [groups, out, inputs].
        """
        if self.input_dim == 0:
            return weight.flatten(1).mT.unsqueeze(0)
        part = weight[slice(*self.rows)]
        return part.reshape(self.groups, part.shape[0] // self.groups, self.count_inputs(weight))

    def view_bias(self, bias: Tensor) -> Tensor:
        """Return the block of a bias as vectors [groups, out]."""
        return bias[slice(*(self.bias_rows or self.rows))].reshape(self.groups, -1)

    def write_matrix(self, weight: Tensor, matrix: Tensor) -> None:
        """Write matrices [groups, out, inputs] to the place that :meth:`view_matrix` reads."""
        if self.input_dim == 0:
            weight.copy_(matrix.squeeze(0).mT.reshape(weight.shape))
        else:
            part = weight[slice(*self.rows)]
            part.copy_(matrix.reshape(part.shape))

    def write_bias(self, bias: Tensor, vector: Tensor) -> None:
        """Write vectors [groups, out] to the place that :meth:`view_bias` reads."""
        bias[slice(*(self.bias_rows or self.rows))].copy_(vector.flatten())

    def embed_matrix(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return a tensor like the parameter that has these matrices as its block and zeros elsewhere.

        Gradients flow through it.
        """
        if self.input_dim == 1 and self.rows == (0, None):
            return matrix.reshape(like.shape)
        whole = torch.zeros_like(like)
        self.write_matrix(whole, matrix)
        return whole

    def embed_bias(self, vector: Tensor, like: Tensor) -> Tensor:
        """Return a tensor like the bias that has these vectors [groups, out] as its block and zeros elsewhere."""
        whole = torch.zeros_like(like)
        self.write_bias(whole, vector)
        return whole


class LayerType:
    """Base class of layer types: the blocks of a layer, its inputs, and how an input unfolds into rows.

    The defaults of all methods but :meth:`find_blocks` suit layers that multiply the last dimension of their first
    argument.

    Attributes:
        is_linear: Whether the layer computes x W^T by ``torch.nn.functional.linear`` and nothing else, which the input
            mode needs.
        is_lookup: Whether the layer looks its input up: an index stands for a one-hot row, and :meth:`unfold_rows`
            returns the indices.
    """

    is_linear = False
    is_lookup = False

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        """Return the blocks of a module's parameters.

        Raises:
            NotImplementedError: The subclass does not define this method.
            TypeError: The module cannot be protected as it is configured. The memory adds its name to the message.
        """
        raise NotImplementedError

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        """Return the inputs of one call by name, each with the samples along dimension 0."""
        input = args[0] if args else kwargs["input"]
        dimensions_of_one_sample = 0 if self.is_lookup else 1
        return {"input": input.unsqueeze(0) if input.dim() == dimensions_of_one_sample else input}

    def find_mask(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the positions that the samples of one call have, as a mask, or None if they have all.

        For layers whose arguments contain the length of each sample, such as a packed sequence. The mask applies to
        every input whose first two dimensions it has, in addition to the mask of the batch.

        Returns:
            Mask of shape [samples, positions], or None.
        """
        return None

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        """Return an input as the rows that the weight multiplies, [groups, n, inputs]."""
        return input.reshape(1, -1, input.shape[-1])

    def get_sharing_key(self, module: nn.Module) -> Hashable:
        """Return a key of how the module unfolds a tensor.

        Modules that read the same tensor and have equal keys see the same rows.
        """
        return "last dimension"

    def apply_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        """Return the positions of an input that a mask [samples, positions] admits; all if it has no such positions."""
        is_sequence = input.dim() > 2 and input.shape[:2] == mask.shape
        return input[mask] if is_sequence else input

    def is_sequence_first(self, input: Tensor, mask: Tensor) -> bool:
        """Return whether an input has positions along dimension 0 and samples along dimension 1.

        Args:
            input: Input of the layer.
            mask: Mask of the batch. [samples, positions]

        Returns:
            What the shapes show; False where there are as many samples as positions.
        """
        return input.dim() > 2 and input.shape[:2] == mask.shape[::-1] != mask.shape


T = TypeVar("T", bound=type[LayerType])
_LAYER_TYPES: dict[type[nn.Module] | str, LayerType] = {}


def register_layer(*modules: type[nn.Module] | str) -> Callable[[T], T]:
    """Register the decorated :class:`LayerType` for module types and their subclasses.

    Args:
        modules: Module types, or their qualified names (``"package.module.Type"``), which import nothing.

    Returns:
        A class decorator.
    """

    def register(layer_type: T) -> T:
        for module in modules:
            _LAYER_TYPES[module] = layer_type()
        return layer_type

    return register


def get_layer_type(module: nn.Module) -> LayerType | None:
    """Return the layer type of a module, or None if it is unknown.

    A subclass that overrides ``forward`` may change its input or its weight before they are multiplied, so the layer
    type of its parent does not apply: it can be registered itself.
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
    """GPT-2's linear layer, which is named a convolution: its weight is [inputs, outputs]."""

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        return [Block("weight", "bias", input_dim=0)]

    def find_inputs(self, module: nn.Module, *args: Any, **kwargs: Any) -> Mapping[str, Tensor]:
        return super().find_inputs(module, *(args or kwargs.values()))


@register_layer(nn.Embedding)
class EmbeddingType(LayerType):
    """``nn.Embedding``: a linear layer without bias on one-hot rows, which are given by their indices."""

    is_lookup = True

    def find_blocks(self, module: nn.Module) -> Sequence[Block]:
        assert isinstance(module, nn.Embedding)
        # With max_norm the forward pass writes to the weight, which no hook of a step sees.
        return [Block("weight", input_dim=0)] if module.max_norm is None else []

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        """Return the indices [n]."""
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
    """Convolutions: the rows are the patches under the kernel; each group has its own."""

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
        # PyTorch resolves numbers, "same" and "valid" into the padding of every side when the layer is created; with
        # zeros it reads ``padding`` at every call, and users do change it.
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
        sizes = module.kernel_size, module.stride, module.padding, module.dilation
        return *map(tuple, sizes), module.groups, module.padding_mode  # subclasses may have lists

    def apply_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        # Dimension 1 has the channels, and a patch covers several positions.
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
        attended = self._compute_attended(module, *args, **kwargs)
        tensors = {name: named[name] for name in ("query", "key", "value")} | {"attended": attended}
        if attended.dim() == 2:  # one sequence without a batch dimension
            views = {id(tensor): tensor.unsqueeze(0) for tensor in tensors.values()}
        elif module.batch_first:
            return tensors
        else:
            views = {id(tensor): tensor.transpose(0, 1) for tensor in tensors.values()}
        # One view for each tensor, so that inputs that were the same tensor still are.
        return {name: views[id(tensor)] for name, tensor in tensors.items()}

    def _compute_attended(self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input of the output projection, by running the module with an identity in its place.

        Hooks do not run: those that gather a sharded module's weights would reshard them after this call.
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
