"""The patches that the published code takes of a convolution's input for the memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sgp.projection.layer_types import ConvType, register_layer


class CornerConv2d(nn.Conv2d):
    """A convolution of which a memory takes in as many patches as it has outputs, but in steps of one from the corner.

    Of a frame of 84 x 84 pixels only the upper left 27 x 27 enter into the memory so, for filters of 8 in steps of 4.
    """


@register_layer(CornerConv2d)
class CornerPatches(ConvType):
    """Patches in steps of one."""

    def unfold_rows(self, module: nn.Module, input: Tensor) -> Tensor:
        assert isinstance(module, CornerConv2d)
        corner = input
        for axis, (size, step) in enumerate(zip(module.kernel_size, module.stride, strict=True), start=2):
            outputs = (input.shape[axis] - size) // step + 1
            corner = corner.narrow(axis, 0, outputs + size - 1)
        patches = torch.nn.functional.unfold(corner, module.kernel_size)
        return patches.transpose(1, 2).reshape(1, -1, patches.shape[1])


def use_corner_patches(network: nn.Module) -> None:
    """Make the strided convolutions of a network such ones; what they compute stays the same."""
    for module in network.modules():
        if type(module) is nn.Conv2d and max(module.stride) > 1:
            module.__class__ = CornerConv2d
