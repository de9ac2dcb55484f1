"""PNN (Rusu et al., 2016): a column of its own for each task, frozen afterwards, that feeds later columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.methods.calls import record_calls
from sgp.methods.method import Batch, Method, NormStatistics, count_parameters, match_memory_format, sum_bytes, use_mode
from sgp.methods.settings import PNNFacts, PNNSettings
from sgp.methods.wired import count_groups, take_two
from sgp.networks.wiring import Layer, Wiring, count_units, find_wiring, get_layer


@dataclass(frozen=True)
class Size:
    """Size of a layer in a column.

    Attributes:
        name: Name of the layer.
        units: Number of the layer's units.
        channels: Channels of the layer's input: channels of a map, or units, each of which a flattened map spreads over
            its pixels.
        pixels: Number of inputs of a linear layer for each channel; 1 for a convolution.
        lateral: Whether earlier columns feed the layer: not if its input is the network's own.
        norm: Name of the BatchNorm behind the layer, if any.
    """

    name: str
    units: int
    channels: int
    pixels: int
    lateral: bool
    norm: str | None


# By the layer's place in the order of running: its inputs in each column that has run.
Seen = dict[int, list[Tensor]]


class LateralLayer(nn.Module):
    """A layer of a column: W h + U relu(V [a_j h_j]), where h_j is the input of the same layer in earlier column j.

    V maps the channels of all h_j to as many as h has, at each pixel by itself: it is a 1x1 convolution, also where the
    map has been flattened for a linear layer. U is like W. The column's own non-linearity, if any, comes behind.

    Args:
        place: Place of the layer in the order of running.
        layer: W, with its bias.
        lateral: U; None without earlier columns.
        channels: Channels of h.
        scales: Initial values of the a_j.
        step: Distance of the pixels of the input that are used, in each direction.
        seen: Inputs of earlier columns, to which the layer adds its own.
    """

    def __init__(
        self, place: int, layer: Layer, lateral: Layer | None, channels: int, scales: Tensor, step: int, seen: Seen
    ) -> None:
        super().__init__()
        self.place, self.channels, self.step, self.seen = place, channels, step, seen
        self.layer, self.lateral = layer, lateral
        if lateral is not None:
            self.reduction = nn.Linear(len(scales) * channels, channels, bias=False).to(layer.weight)
            self.scales = nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [n, units, ...] from x: [n, inputs, ...]."""
        if self.step > 1:
            x = x[:, :, :: self.step, :: self.step]
        earlier = self.seen.setdefault(self.place, [])
        out: Tensor = self.layer(x)
        if self.lateral is not None:
            out = out + self.lateral(self._reduce(earlier).relu())
        earlier.append(x)
        return out

    def _reduce(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute V [a_j h_j], in the shape of the layer's input."""
        scaled = [scale * each for scale, each in zip(self.scales, inputs, strict=True)]
        if scaled[0].dim() == 4:
            return F.conv2d(torch.cat(scaled, dim=1), self.reduction.weight[:, :, None, None])
        channels = torch.cat([each.view(len(each), self.channels, -1) for each in scaled], dim=1)
        # As one matrix: how torch multiplies a stack of them, and so rounds, depends on whether the weight is trained.
        reduced: Tensor = self.reduction(channels.mT.reshape(-1, channels.shape[1]))
        return reduced.view(len(channels), -1, self.channels).mT.flatten(start_dim=1)


class PNN(PNNFacts, Method[PNNSettings]):
    """Progressive neural network.

    Layer i of column k, which learns task k, also reads the columns before it:

        h_i^k = f(W h_{i-1}^k + U relu(V [a_j h_{i-1}^j]_{j<k}))        at the head the same without f

    W, U, V and the scalars a_j are learned with the task and frozen after it; task k uses columns 0..k. So the outputs
    for an old task stay as they are, to the bit. The layer that reads the network's own input has W alone.

    The network that the method is given is never trained: columns are made like it. A column has its layers, with fewer
    units if so set, the norm layers behind them and, of several heads, the task's own. Weights of W and U are drawn
    from those of the network's layer, times the root of inputs there over inputs here, which keeps the network's
    initialization. Earlier columns are in eval mode also while a later one is trained.
    """

    # The network itself is not evaluated; columns have statistics of their own.
    norm_statistics: NormStatistics = "own"

    def __init__(self, network: nn.Module, settings: PNNSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.columns = nn.ModuleList()
        # The task of each column, and its layers in the order of running.
        self._heads: list[int] = []
        self._sizes: list[list[Size]] = []
        self._seen: Seen = {}

    @property
    def trained_module(self) -> nn.Module:
        return self.columns

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        inputs = take_two(batches)
        wiring = find_wiring(self.network, inputs, head, exclude=self.exclude)
        self._add_column(head, self._compute_sizes(wiring, _order_layers(self.network, inputs, head)))

    def _compute_sizes(self, wiring: Wiring, order: Sequence[str]) -> list[Size]:
        hidden, sizes = set(wiring.gated), []

        def compute_width(name: str) -> int:
            count = count_units(get_layer(self.network, name))
            return max(1, round(self.settings.column_width * count)) if name in hidden else count

        for name in order:
            layer, place = get_layer(self.network, name), wiring.places[name]
            if (groups := count_groups(layer)) > 1:
                raise TypeError(f"layer {name!r} has {groups} groups: PNN builds columns of plain layers only")
            channels, pixels = _count_inputs(layer), 1
            if place.sources:
                source = place.sources[0]  # any others are added to it and have as many units
                pixels = channels // count_units(get_layer(self.network, source))
                channels = compute_width(source)
            sizes.append(Size(name, compute_width(name), channels, pixels, bool(place.sources), place.norm))
        if self._sizes and len(sizes) != len(self._sizes[0]):
            raise TypeError(f"a task runs {len(sizes)} layers, the first ran {len(self._sizes[0])}: PNN needs the same")
        return sizes

    def _add_column(self, head: int, sizes: Sequence[Size]) -> None:
        """Add a column, the only one that is trained."""
        self.columns.requires_grad_(False)
        column = deepcopy(self.network)
        # Layers that the task does not run are left out, such as the other heads.
        for name, module in self.network.named_modules():
            if isinstance(module, Layer) and name not in {size.name for size in sizes}:
                column.set_submodule(name, nn.Identity())
        for place, size in enumerate(sizes):
            layer = get_layer(self.network, size.name)
            lateral = _resize_layer(layer, size, bias=False) if size.lateral and self._heads else None
            scales = self.settings.scale_deviation * torch.randn(len(self._heads)).to(layer.weight)
            own, step = _resize_layer(layer, size), _get_pixel_step(layer)
            wrapped = LateralLayer(place, own, lateral, size.channels, scales, step, self._seen)
            column.set_submodule(size.name, wrapped)
            if size.norm is not None:
                column.set_submodule(size.norm, _resize_norm(self.network.get_submodule(size.norm), size.units))
        self.columns.append(column)
        self._heads.append(head)
        self._sizes.append(list(sizes))

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        # A head that occurs again has the column that was made for it last.
        last = max(place for place, of in enumerate(self._heads) if of == head)
        self._seen.clear()
        try:
            with torch.no_grad():
                for place in range(last):
                    self.columns[place].eval()(inputs, self._heads[place])
            # The trainer knows only the network, and sets its mode.
            out: Tensor = self.columns[last].train(self.network.training)(inputs, head)
        finally:
            self._seen.clear()
        return out

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        self.columns.requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {"heads": list(self._heads), "sizes": [[asdict(size) for size in sizes] for sizes in self._sizes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.columns = nn.ModuleList()
        self._heads, self._sizes = [], []
        for head, sizes in zip(state["heads"], state["sizes"], strict=True):
            self._add_column(head, [Size(**size) for size in sizes])  # their values are with the weights

    def count_bytes(self) -> dict[str, int]:
        return {"columns": sum_bytes(self.columns.parameters())}

    def compute_capacity(self) -> float:
        return 100 * count_parameters(self.columns) / count_parameters(self.network)


def _count_inputs(layer: Layer) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _order_layers(network: nn.Module, inputs: Tensor, head: int) -> list[str]:
    """Return the names of the layers that run for a head, in the order of running."""
    layers = {name: module for name, module in network.named_modules() if isinstance(module, Layer)}
    with torch.no_grad(), use_mode(network, training=False), record_calls(layers) as calls:
        network(inputs, head)
    order = [call.layer for call in calls]
    repeated = {name for name in order if order.count(name) > 1}
    if repeated:
        raise TypeError(f"layer {min(repeated)!r} runs more than once: PNN cannot tell its inputs apart")
    return order


@torch.no_grad()
def _resize_layer(layer: Layer, size: Size, *, bias: bool = True) -> Layer:
    """Return a layer of another size with weights drawn from a given layer's."""
    inputs, new = size.channels * size.pixels, deepcopy(layer)

    def draw(source: Tensor, *shape: int) -> nn.Parameter:
        values = source.flatten()[torch.randint(source.numel(), shape, device=source.device)]
        values *= math.sqrt(_count_inputs(layer) / inputs)
        return nn.Parameter(match_memory_format(values, like=source))

    new.weight = draw(layer.weight, size.units, inputs, *layer.weight.shape[2:])
    new.bias = draw(layer.bias, size.units) if bias and layer.bias is not None else None
    if isinstance(new, nn.Linear):
        new.in_features, new.out_features = inputs, size.units
    else:
        new.in_channels, new.out_channels = inputs, size.units
        if _get_pixel_step(layer) > 1:
            new.stride = (1, 1)
    return new


def _get_pixel_step(layer: Layer) -> int:
    """Return the stride of a 1x1 convolution, which can skip pixels beforehand instead; 1 for all other layers.

    It has to: for fewer than 8 input channels in channels_last format, the backward pass of a strided one writes past
    the end of its memory (torch 2.13 on a CPU).
    """
    if isinstance(layer, nn.Linear) or layer.kernel_size != (1, 1) or layer.padding != (0, 0):
        return 1
    return layer.stride[0] if layer.stride[0] == layer.stride[1] else 1


def _resize_norm(norm: nn.Module, features: int) -> nn.Module:
    """Return a new BatchNorm of another size."""
    assert isinstance(norm, _BatchNorm)
    options = {key: getattr(norm, key) for key in ("eps", "momentum", "affine", "track_running_stats")}
    new = type(norm)(features, **options)
    return new if norm.weight is None else new.to(norm.weight)
