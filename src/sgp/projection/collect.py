"""Collect the inputs of a model's layers with forward hooks, and accumulate them in Gram matrices."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sgp.projection.anchor import unwrap_module
from sgp.projection.batches import (
    count_samples,
    evaluation_pass,
    find_first_tensor,
    get_mask,
    make_forward,
    move_batch,
)
from sgp.projection.gram import GramPath, InputGram, RowCount
from sgp.projection.layer import ProtectedLayer
from sgp.projection.layer_types import LayerType, get_layer_type
from sgp.projection.precision import full_precision
from sgp.projection.sketch import WideGram
from sgp.projection.subspace import Subspace
from sgp.projection.tokens import TokenCounts

# The input of a convolution is unfolded for as many samples at a time as fit in this many bytes.
BYTES_PER_CHUNK = 64 * 2**20


def collect_inputs(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Sequence[ProtectedLayer],
    *,
    forward: Callable[[Any], Any] | None = None,
    samples: Mapping[str, int | None] | None = None,
    paths: Mapping[str, GramPath] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
    in_step: Callable[[Iterator[Any], Callable[[Any], Any]], None] | None = None,
    after_batch: Callable[[Mapping[str, InputGram]], bool] | None = None,
) -> dict[str, InputGram]:
    """Run one pass over the batches, and collect the Gram matrix of every layer that sees an input.

    A FloatingPointError that names the layer is raised if an input contains NaN or infinity, and a ValueError if there
    is no batch, or a batch or its mask has an invalid form.

    Args:
        model: Model that runs in eval mode without gradients; its flags, buffers and random states are restored.
        batches: Iterable of tensors, tuples whose first item is the input, or dicts that are passed as keywords.
        layers: Layers whose inputs are collected.
        forward: Function that runs one batch through the model, for batches of any other kind.
        samples: Number of samples to use by layer; None for all, for a single layer or for every layer.
        paths: Way of collecting the inputs by layer; by default, products and sums in float64.
        mask: Function that returns which positions of a batch count, [samples, positions], or None if all do. Without
            it, the ``attention_mask`` of a dict, or of a tuple that contains one, is used.
        in_step: Function that runs the batches of several processes in lockstep. It may run the last batch again,
            which is not counted. An error in a hook is then raised at the end of the forward pass only, since other
            processes take part in it.
        after_batch: Function that is called with the Gram matrices after each batch, and returns whether the pass may
            end.

    Returns:
        Gram matrix by layer. Layers that read the same tensors throughout, such as query, key and value, share one
        object.
    """
    samples = samples or dict.fromkeys([layer.name for layer in layers])
    collector = _Collector(model, layers, samples, paths or {}, mask, can_stop=in_step is None)
    run = forward or make_forward(model)
    limits = [samples[layer.name] for layer in layers]
    most = None if any(limit is None for limit in limits) else max(limit for limit in limits if limit is not None)
    with evaluation_pass(model, batches), collector.register_hooks():
        (in_step or _run_all)(collector.iterate(batches, most, after_batch), run)
    return collector.grams


def _run_all(batches: Iterator[Any], run: Callable[[Any], Any]) -> None:
    for batch in batches:
        run(batch)


class _Collector:
    """Forward hooks that turn each call of a protected module into rows of its layers' Gram matrices."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[ProtectedLayer],
        samples: Mapping[str, int | None],
        paths: Mapping[str, GramPath],
        mask: Callable[[Any], Tensor | None] | None,
        *,
        can_stop: bool,
    ) -> None:
        self.samples_seen = 0  # samples of the batches that are complete
        self._model = model
        self._samples = samples
        self._paths = {layer.name: paths.get(layer.name, GramPath()) for layer in layers}
        self._get_mask = mask
        self._mask: Tensor | None = None
        self._call_mask: Tensor | None = None  # mask of the module call that is being read
        self._batch_size: int | None = None
        self._length: int | None = None  # number of positions of the batch's samples
        self._is_paused = True  # except while a batch runs
        self._can_stop = can_stop
        self._failure: Exception | None = None
        # module -> the layers that read one of its inputs, and which one
        self._readers: dict[str, list[tuple[ProtectedLayer, str]]] = {}
        for layer in layers:
            for source in layer.sources:
                self._readers.setdefault(source.module, []).append((layer, source.input))
        self._positions_first = {name for name in self._readers if _has_positions_first(model, name)}
        self._histories: dict[str, _History] = {}  # by layer
        self._first: defaultdict[Hashable, WeakSet[_History]] = defaultdict(WeakSet)  # histories of one tensor

    @property
    def grams(self) -> dict[str, InputGram]:
        """Gram matrix of every layer that saw an input; layers that read the same tensors have the same object.

        An input of which the mask leaves nothing was not seen.
        """
        return {name: history.gram for name, history in self._histories.items() if history.gram.count}

    def iterate(
        self, batches: Iterable[Any], most: int | None, after_batch: Callable[[Mapping[str, InputGram]], bool] | None
    ) -> Iterator[Any]:
        """Yield batches up to a number of samples, and record module calls until the next one is requested.

        Raises:
            ValueError: There is no batch.
        """
        for batch in batches:
            batch = move_batch(batch, self._model)
            self._begin(batch)
            yield batch
            self._end()
            if after_batch is not None and after_batch(self.grams):
                return
            if most is not None and self.samples_seen >= most:
                return
        if self.samples_seen == 0:
            raise ValueError("the loader gave no batch: there is nothing to take a representation from")

    def _begin(self, batch: Any) -> None:
        self._mask = get_mask(batch, self._get_mask)
        self._batch_size = count_samples(batch, self._mask)
        first = find_first_tensor(batch) if self._mask is None else self._mask
        self._length = None if first is None or first.dim() < 2 else first.shape[1]
        self._is_paused = False

    def _end(self) -> None:
        self._is_paused = True
        if self._failure is not None:
            raise self._failure
        self.samples_seen += self._batch_size or 1

    @contextmanager
    def register_hooks(self) -> Iterator[None]:
        """Register a forward pre-hook on every module that a layer reads, and remove it afterwards."""
        with ExitStack() as stack:
            for name, readers in self._readers.items():
                module = _find_module(self._model, name, readers[0][0])
                handle = module.register_forward_pre_hook(self._make_hook(name, readers), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _make_hook(self, name: str, readers: list[tuple[ProtectedLayer, str]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A layer type may call the module itself to compute an inner input; such a call is not recorded.
            if self._is_paused or self._failure is not None:
                return
            self._is_paused = True
            try:
                layer_type = _get_type(module)
                inputs = layer_type.find_inputs(module, *args, **kwargs)
                self._call_mask = layer_type.find_mask(module, *args, **kwargs)
                for layer, key in readers:
                    if self._count_wanted(layer, len(inputs[key])):
                        self._read(name, layer, module, inputs[key])
            except Exception as error:
                if self._can_stop:
                    raise
                self._failure = error  # raised in _end: other processes take part in this forward pass
            finally:
                self._is_paused = False

        return hook

    def _read(self, name: str, layer: ProtectedLayer, module: nn.Module, tensor: Tensor) -> None:
        """Record that a layer read a tensor; layers that have read the same tensors so far add it once."""
        before = self._histories.get(layer.name)
        following = self._first[self._get_sharing_key(layer, module)] if before is None else before.following
        moment = self.samples_seen, self._call_mask
        after = next((history for history in following if history.ends_with(tensor, moment)), None)
        if after is None:
            gram = self._make_gram(layer, module, tensor) if before is None else before.gram
            if before is not None and sum(history is before for history in self._histories.values()) > 1:
                gram = gram.clone()  # the other layers may read another tensor next
            after = _History(gram, tensor, moment)
            self._add(name, layer, module, gram, tensor)
            following.add(after)
        self._histories[layer.name] = after

    def _get_sharing_key(self, layer: ProtectedLayer, module: nn.Module) -> Hashable:
        """Return a key that layers must have in common to share a Gram matrix.

        A tied weight, which has inputs of several modules, shares its Gram matrix with no other layer.
        """
        if len(layer.sources) > 1:
            return layer.name
        unfolding = _get_type(module).get_sharing_key(module)
        has_positions_first = layer.sources[0].module in self._positions_first
        path, limit = self._paths[layer.name], self._samples[layer.name]
        # A sketch depends on the layer's own bases; a Gram matrix depends on the inputs and the precision only.
        how = (path, id(path.omega), id(layer.subspace)) if path.kind == "sketch" else (path.kind, path.is_precise)
        return unfolding, layer.bias is None, how, limit, has_positions_first

    def _count_wanted(self, layer: ProtectedLayer, items: int) -> int:
        """Return how many items along dimension 0 of an input belong to the samples that a layer still needs."""
        limit = self._samples[layer.name]
        if limit is None or self._batch_size is None or limit - self.samples_seen >= self._batch_size:
            return items
        wanted = max(0, limit - self.samples_seen)
        # Where dimension 0 combines samples with windows or time, each sample has an equal share of the items.
        return -(-items * wanted // self._batch_size)

    def _move_samples_first(self, name: str, layer_type: LayerType, tensor: Tensor) -> Tensor:
        """Return an input with its samples along dimension 0, if their dimension can be recognized.

        Ids that are looked up once for the whole batch, such as position ids, count for each of its samples, since
        bases must not depend on how the data are batched.
        """
        if name in self._positions_first and tensor.dim() > 2:
            tensor = tensor.transpose(0, 1)
        mask = self._mask if self._call_mask is None else None  # a call with its own mask has its samples first
        if mask is not None and layer_type.is_sequence_first(tensor, mask):
            tensor = tensor.transpose(0, 1)
        if not layer_type.is_lookup or self._batch_size is None:
            return tensor
        if tensor.dim() == 1 and len(tensor) == self._length != self._batch_size:
            tensor = tensor.unsqueeze(0)
        return tensor.expand(self._batch_size, *tensor.shape[1:]) if len(tensor) == 1 else tensor

    def _combine_masks(self) -> Tensor | None:
        """Return which positions of a call's inputs count in both the mask of the call and that of the batch."""
        mask, call_mask = self._mask, self._call_mask
        if mask is None or call_mask is None:
            return mask if call_mask is None else call_mask
        return call_mask & mask.to(call_mask.device) if mask.shape == call_mask.shape else call_mask

    def _make_gram(self, layer: ProtectedLayer, module: nn.Module, tensor: Tensor) -> InputGram:
        layer_type = _get_type(module)
        if tensor.is_meta:
            return RowCount(1, 0)
        if layer_type.is_lookup:
            return TokenCounts(layer.weight.tensor.shape[0])
        groups, _, inputs = layer_type.unfold_rows(module, tensor[:1]).shape
        path, constant = self._paths[layer.name], layer.bias is not None
        if path.kind == "float64":
            return InputGram(groups, inputs, constant=constant, precise=path.is_precise)
        subspace = layer.subspace if path.kind == "sketch" else None
        basis = None
        if isinstance(subspace, Subspace):
            basis = subspace.get_orthonormal_basis(tensor.device, torch.float32)[0]
        return WideGram(
            inputs, path.threshold, constant=constant, basis=basis, can_sketch=path.kind == "sketch", omega=path.omega
        )

    def _add(self, name: str, layer: ProtectedLayer, module: nn.Module, gram: InputGram, tensor: Tensor) -> None:
        layer_type = _get_type(module)
        tensor = self._move_samples_first(name, layer_type, tensor)
        wanted = self._count_wanted(layer, len(tensor))
        mask = self._combine_masks()
        if mask is not None and len(tensor) == 1:  # one item for all samples, such as the vectors of their positions
            mask = mask[: self._count_wanted(layer, len(mask))].any(0, keepdim=True)
        tensor = tensor[:wanted]
        if mask is not None and not tensor.is_meta:  # how many positions count depends on values
            tensor = layer_type.apply_mask(tensor, mask[:wanted].to(tensor.device))
        step = max(1, BYTES_PER_CHUNK // max(1, layer_type.unfold_rows(module, tensor[:1]).nbytes))
        for chunk in torch.split(tensor, step):
            try:
                with full_precision(chunk.device):  # the user's forward may run inside autocast
                    gram.add(layer_type.unfold_rows(module, chunk))
            except FloatingPointError:
                raise FloatingPointError(
                    f"layer {name or '(model)'!r}: its input holds NaN or an infinity, or numbers too large to square; "
                    "the memory is unchanged"
                ) from None
            except ValueError as error:
                raise ValueError(f"layer {name or '(model)'!r}: {error}") from None


class _History:
    """Sequence of tensors that some layers have read, and their Gram matrix.

    Layers with the same history share a Gram matrix. The first of them to read another tensor adds it to the matrix and
    moves on to a longer history; the others follow when they read the tensor too. Only layers keep a history alive, so
    it is freed once all of them have moved on.

    Attributes:
        gram: Gram matrix of the tensors.
        following: Histories that continue this one by one tensor.
    """

    def __init__(self, gram: InputGram, tensor: Tensor, moment: tuple[int, Tensor | None]) -> None:
        self.gram = gram
        self.following: WeakSet[_History] = WeakSet()
        self._tensor = weakref.ref(tensor)
        self._version = _get_version(tensor)
        self._moment = moment

    def ends_with(self, tensor: Tensor, moment: tuple[int, Tensor | None]) -> bool:
        """Return whether the last tensor is this one, unchanged, in the same batch and with the same mask."""
        is_same_moment = self._moment[0] == moment[0] and self._moment[1] is moment[1]
        return self._tensor() is tensor and _get_version(tensor) == self._version and is_same_moment


def _get_version(tensor: Tensor) -> int:
    """Return a counter of in-place changes; -1 for tensors of inference mode, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def _has_positions_first(model: nn.Module, name: str) -> bool:
    """Return whether a module is a linear layer inside one of torch's transformer layers with ``batch_first=False``."""
    parent = unwrap_module(model.get_submodule(name.rpartition(".")[0]))
    if not isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return False
    is_linear = isinstance(unwrap_module(model.get_submodule(name)), nn.Linear)
    return is_linear and not unwrap_module(parent.self_attn).batch_first


def _get_type(module: nn.Module) -> LayerType:
    """Return the type of a module, which need not be its layer's: tied weights may be in layers of two types."""
    layer_type = get_layer_type(module)
    assert layer_type is not None
    return layer_type


def _find_module(model: nn.Module, name: str, layer: ProtectedLayer) -> nn.Module:
    """Return the module of a layer that was found under a name. It may have been wrapped since then."""
    found, weight = model.get_submodule(name), layer.weight.tensor
    for module in found.modules():
        if get_layer_type(module) is not None and any(parameter is weight for parameter in module.parameters()):
            return module
    return found
