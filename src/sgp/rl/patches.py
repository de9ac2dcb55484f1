"""The patches of a convolution's input from which the published code updates the memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sgp.projection.layer_types import ConvType, register_layer


class CornerConv2d(nn.Conv2d):
    """A convolution whose patches for a memory have stride 1 and start in the corner, as many as it has outputs.

    For a frame of 84 x 84 pixels and filters of 8 with stride 4, they cover only the upper left 27 x 27 pixels.
    """


@register_layer(CornerConv2d)
class CornerPatches(ConvType):
    """Patches with stride 1."""

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        assert isinstance(module, CornerConv2d)
        corner = input
        for axis, (size, stride) in enumerate(zip(module.kernel_size, module.stride, strict=True), start=2):
            outputs = (input.shape[axis] - size) // stride + 1
            corner = corner.narrow(axis, 0, outputs + size - 1)
        patches = torch.nn.functional.unfold(corner, module.kernel_size)
        return patches.transpose(1, 2).reshape(1, -1, patches.shape[1])


def use_corner_patches(network: nn.Module) -> None:
    """Convert the strided convolutions of a network to `CornerConv2d`; their outputs stay the same."""
    for module in network.modules():
        if type(module) is nn.Conv2d and max(module.stride) > 1:
            module.__class__ = CornerConv2d
