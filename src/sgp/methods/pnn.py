"""PNN (Rusu et al., 2016): a column of its own for each task, frozen afterwards, that later columns may draw on."""

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

from sgp.methods.method import Batch, Method, Moment, NormStatistics
from sgp.methods.settings.pnn import PNNFacts, PNNSettings
from sgp.networks.wiring import Layer, Wiring, find_wiring, units


@dataclass(frozen=True)
class Size:
    """Of a layer in a column.

    Attributes:
        name: of the layer.
        units: of the layer.
        channels: of its input: channels of a map, or units, each of which a flattened map spreads over its pixels.
        pixels: how many inputs of a linear layer each channel is spread over; 1 for a convolution.
        lateral: whether earlier columns have something to add: not where it meets the network's own input.
        norm: name of the BatchNorm behind it, if any.
    """

    name: str
    units: int
    channels: int
    pixels: int
    lateral: bool
    norm: str | None


# By the layer's place in the order of running: what it met in each column that has run.
Seen = dict[int, list[Tensor]]


class LateralLayer(nn.Module):
    """A layer of a column: W h + U relu(V [a_j h_j]), where h_j is what the same layer of earlier column j has met.

    V takes the channels of all h_j to as many as h has, at each pixel by itself: it is a 1x1 convolution, also where
    the map has been flattened for a linear layer. U is like W. The column's own non-linearity, if any, comes behind.

    Args:
        place: in the order of running.
        layer: W, with its bias.
        lateral: U; None where there is nothing to draw on.
        channels: of h.
        scales: the first a_j.
        step: the pixels of the input that are looked at, every so many in each direction.
        seen: where the layer finds what earlier columns met, and leaves its own input.
    """

    def __init__(
        self,
        place: int,
        layer: Layer,
        lateral: Layer | None,
        channels: int,
        scales: Tensor,
        step: int,
        seen: Seen,
    ) -> None:
        super().__init__()
        self.place, self.channels, self.step, self.seen = place, channels, step, seen
        self.layer, self.lateral = layer, lateral
        if lateral is not None:
            self.reduction = nn.Linear(len(scales) * channels, channels, bias=False).to(layer.weight)
            self.scales = nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, inputs, ...] -> [n, units, ...]."""
        if self.step > 1:
            x = x[:, :, :: self.step, :: self.step]
        met = self.seen.setdefault(self.place, [])
        out: Tensor = self.layer(x)
        if self.lateral is not None:
            out = out + self.lateral(self._reduced(met).relu())
        met.append(x)
        return out

    def _reduced(self, met: Sequence[Tensor]) -> Tensor:
        """V [a_j h_j], in the shape of the layer's input."""
        scaled = [scale * each for scale, each in zip(self.scales, met, strict=True)]
        if scaled[0].dim() == 4:
            return F.conv2d(torch.cat(scaled, dim=1), self.reduction.weight[:, :, None, None])
        channels = torch.cat([each.view(len(each), self.channels, -1) for each in scaled], dim=1)
        # As one matrix: how torch multiplies a stack of them, and so rounds, depends on whether the weight is trained.
        reduced: Tensor = self.reduction(channels.mT.reshape(-1, channels.shape[1]))
        return reduced.view(len(channels), -1, self.channels).mT.flatten(start_dim=1)


class PNN(PNNFacts, Method[PNNSettings]):
    """Progressive neural network.

    Layer i of column k, which learns task k, draws on the columns before it:

        h_i^k = f(W h_{i-1}^k + U relu(V [a_j h_{i-1}^j]_{j<k}))        at the head the same without f

    W, U, V and the scalars a_j are learned with the task and frozen after it; columns 0..k answer for the task. So the
    answers for an old task stay as they are, to the bit. The layer that meets the network's own input has W alone.

    The network that the method is given is never trained: columns are made like it. A column has its layers, with fewer
    units if so set, the norm layers behind them and, of several heads, that of its task. Weights of W and U are drawn
    from those of the network's layer, times the root of inputs there over inputs here, which keeps the initialisation
    that the network has. Earlier columns are in eval mode also while a later one is trained.
    """

    def __init__(self, network: nn.Module, settings: PNNSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.columns = nn.ModuleList()
        # The task of each column, and its layers in the order of running.
        self._heads: list[int] = []
        self._sizes: list[list[Size]] = []
        self._seen: Seen = {}

    @property
    def trained(self) -> nn.Module:
        return self.columns

    @property
    def statistics(self) -> NormStatistics:
        # The network is not what answers; columns have statistics of their own.
        return "own"

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        inputs, _ = next(iter(batches))
        # Two of them, for BatchNorm cannot divide by the deviation of one.
        two = torch.cat([inputs[:2], inputs[:2]])[:2]
        wiring = find_wiring(self.network, two, head, exclude=self.exclude)
        self._add(head, self._column_sizes(wiring, _order_of_layers(self.network, two, head)))

    def _column_sizes(self, wiring: Wiring, order: Sequence[str]) -> list[Size]:
        hidden, sizes = set(wiring.gated), []

        def width(name: str) -> int:
            count = units(self._layer(name))
            return max(1, round(self.settings.column_width * count)) if name in hidden else count

        for name in order:
            layer, place = self._layer(name), wiring.places[name]
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                raise TypeError(f"layer {name!r} has {layer.groups} groups: PNN makes columns of plain layers alone")
            inputs = _inputs(layer)
            if place.sources:
                source = place.sources[0]  # any others are added to it and have as many units
                channels, pixels = width(source), inputs // units(self._layer(source))
            else:
                channels, pixels = inputs, 1
            sizes.append(Size(name, width(name), channels, pixels, bool(place.sources), place.norm))
        if self._sizes and len(sizes) != len(self._sizes[0]):
            raise TypeError(f"a task runs {len(sizes)} layers, the first ran {len(self._sizes[0])}: PNN needs the same")
        return sizes

    def _layer(self, name: str) -> Layer:
        layer = self.network.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer

    def _add(self, head: int, sizes: Sequence[Size]) -> None:
        """A new column, the only one that is trained."""
        self.columns.requires_grad_(False)
        column = deepcopy(self.network)
        # What the task does not run is left out, such as the other heads.
        for name, module in self.network.named_modules():
            if isinstance(module, Layer) and name not in {size.name for size in sizes}:
                column.set_submodule(name, nn.Identity())
        for place, size in enumerate(sizes):
            layer = self._layer(size.name)
            lateral = _resized(layer, size, bias=False) if size.lateral and self._heads else None
            scales = self.settings.scale_deviation * torch.randn(len(self._heads)).to(layer.weight)
            own, step = _resized(layer, size), _step_over_pixels(layer)
            wrapped = LateralLayer(place, own, lateral, size.channels, scales, step, self._seen)
            column.set_submodule(size.name, wrapped)
            if size.norm is not None:
                column.set_submodule(size.norm, _resized_norm(self.network.get_submodule(size.norm), size.units))
        self.columns.append(column)
        self._heads.append(head)
        self._sizes.append(list(sizes))

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.logits(inputs, head), labels)

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        # A head that has come again has the column that was made for it last.
        last = max(place for place, of in enumerate(self._heads) if of == head)
        self._seen.clear()
        try:
            with torch.no_grad():
                for place in range(last):
                    self.columns[place].eval()(inputs, self._heads[place])
            # The loop knows the network alone, whose mode it sets.
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
            self._add(head, [Size(**size) for size in sizes])  # their values are with the weights

    def bytes(self) -> dict[str, int]:
        return {"columns": sum(each.nbytes for each in self.columns.parameters())}

    def capacity(self) -> float:
        own = sum(each.numel() for each in self.columns.parameters())
        return 100 * own / sum(each.numel() for each in self.network.parameters())


def _inputs(layer: Layer) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def _order_of_layers(network: nn.Module, inputs: Tensor, head: int) -> list[str]:
    """Names of the layers that run for a head, in their order."""
    order: list[str] = []
    training = network.training
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: order.append(name))
        for name, module in network.named_modules()
        if isinstance(module, Layer)
    ]
    try:
        with torch.no_grad():
            network.eval()(inputs, head)
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    twice = {name for name in order if order.count(name) > 1}
    if twice:
        raise TypeError(f"layer {min(twice)!r} runs more than once: PNN cannot tell its inputs apart")
    return order


@torch.no_grad()
def _resized(layer: Layer, size: Size, *, bias: bool = True) -> Layer:
    """A layer of another size with weights drawn from those of a given one."""
    inputs, new = size.channels * size.pixels, deepcopy(layer)

    def drawn(source: Tensor, *shape: int) -> nn.Parameter:
        values = source.flatten()[torch.randint(source.numel(), shape, device=source.device)]
        values *= math.sqrt(_inputs(layer) / inputs)
        last = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)
        return nn.Parameter(values.contiguous(memory_format=torch.channels_last) if last else values)

    new.weight = drawn(layer.weight, size.units, inputs, *layer.weight.shape[2:])
    new.bias = drawn(layer.bias, size.units) if bias and layer.bias is not None else None
    if isinstance(new, nn.Linear):
        new.in_features, new.out_features = inputs, size.units
    else:
        new.in_channels, new.out_channels = inputs, size.units
        if _step_over_pixels(layer) > 1:
            new.stride = (1, 1)
    return new


def _step_over_pixels(layer: Layer) -> int:
    """The stride of a 1x1 convolution, which can as well skip the pixels beforehand; 1 for all other layers.

    It has to: for fewer than 8 input channels in the order channels_last the backward pass of a strided one writes past
    the end of its memory (torch 2.13 on a CPU).
    """
    if isinstance(layer, nn.Linear) or layer.kernel_size != (1, 1) or layer.padding != (0, 0):
        return 1
    return layer.stride[0] if layer.stride[0] == layer.stride[1] else 1


def _resized_norm(norm: nn.Module, features: int) -> nn.Module:
    """BatchNorm of another size, as it is at first."""
    assert isinstance(norm, _BatchNorm)
    new = type(norm)(
        features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
    )
    return new if norm.weight is None else new.to(norm.weight)
