"""Protected, frozen and free parameters and the free capacity of a memory, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any

from sgp.projection.layer import ProtectedLayer
from sgp.projection.protected_model import ProtectedModel
from sgp.projection.scan import NOT_TRAINED

HEADER = ("layer", "layers", "bases / dim", "blocked", "free", "bytes")
# Number of characters at which lists of parameters are wrapped.
WIDTH = 80


@dataclass(frozen=True)
class LayerCapacity:
    """Capacity of one protected layer.

    Attributes:
        layer: Name of the layer.
        bases: Number of its bases.
        dimension: Largest possible number of bases: the input dimension, including the constant input of a protected
            bias.
        blocked: Number of bases of importance 1.
        free: One minus the mean importance over all dimensions.
        bytes: Bytes of bases and importances; a subspace that layers share is counted for the first of them.
        shares: Name of the first layer that has the same subspace; None if this is the first one.
    """

    layer: str
    bases: int
    dimension: int
    blocked: int
    free: float
    bytes: int
    shares: str | None = None


@dataclass(frozen=True)
class Capacity:
    """Capacity of a memory.

    Attributes:
        layers: Protected layers, in the model's order.
        frozen: Parameter -> why it does not change after the first task.
        free: Parameter -> why it changes without protection.
        tied: Tied weight -> its modules. It is projected for the inputs of each.
        two_sided: Tied weights that an embedding and an output layer use from both sides.
    """

    layers: list[LayerCapacity]
    frozen: dict[str, str]
    free: dict[str, str]
    tied: dict[str, list[str]] = field(default_factory=dict)
    two_sided: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all subspaces."""
        return sum(layer.bytes for layer in self.layers)


def measure_capacity(protected: ProtectedModel) -> Capacity:
    """Return the protected, frozen and free parameters of a model and the free capacity of its layers."""
    scan = protected.scan
    statistics = [f"{name}.{leaf}" for name in scan.norm_modules for leaf in ("running_mean", "running_var")]
    tied = {weight: names for weight, names in find_owners(protected).items() if len(names) > 1}
    two_sided = {layer.weight.name for layer in scan.layers.values() if layer.is_two_sided}
    return Capacity(
        _measure_layers(scan.layers.values()),
        frozen=scan.frozen | dict.fromkeys(statistics, "norm statistics"),
        free=dict(scan.free),
        tied=tied,
        two_sided=[weight for weight in tied if weight in two_sided],
    )


def _measure_layers(layers: Iterable[ProtectedLayer]) -> list[LayerCapacity]:
    measured = []
    first_of: dict[int, str] = {}
    for layer in layers:
        subspace, dimension = layer.subspace, layer.groups * layer.dimension
        if subspace is None:
            measured.append(LayerCapacity(layer.name, 0, dimension, 0, 1.0, 0))
            continue
        first = first_of.setdefault(id(subspace), layer.name)
        measured.append(
            LayerCapacity(
                layer=layer.name,
                bases=int(subspace.rank.sum()),
                dimension=dimension,
                blocked=subspace.blocked,
                free=subspace.free,
                bytes=subspace.nbytes if first == layer.name else 0,
                shares=None if first == layer.name else first,
            )
        )
    return measured


def find_owners(protected: ProtectedModel) -> dict[str, list[str]]:
    """Return for each protected weight its modules for whose inputs it is protected."""
    places: dict[int, list[str]] = {}
    for name, parameter in protected.model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    owners: dict[str, list[str]] = {}
    for layer in protected.layers.values():
        candidates = places.get(id(layer.weight.tensor), []) if layer.weight.is_present else []
        # The weight of a block may belong to a module inside the block's module.
        inside = [p or "(model)" for p in candidates if any(_is_inside(p, source.module) for source in layer.sources)]
        found = owners.setdefault(layer.weight.name, [])
        found += [place for place in inside if place not in found]
    return owners


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


@dataclass(frozen=True)
class Summary:
    """Table of the protected layers and of all other parameters with the reasons.

    It can be printed, displayed in a notebook, or converted with :meth:`to_dict`.
    """

    capacity: Capacity
    tasks: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of all layers as plain values."""
        return {"tasks": self.tasks, "bytes": self.capacity.bytes} | asdict(self.capacity)

    def __str__(self) -> str:
        capacity = self.capacity
        total = ("total", str(len(capacity.layers)), "", "", "", format_bytes(capacity.bytes))
        header, *rows, total_row = align_columns([HEADER, *_make_rows(capacity), total])
        lines = [
            f"GradientMemory after {self.tasks} task{'s' * (self.tasks != 1)}",
            "",
            header,
            "-" * len(header),
            *rows,
        ]
        lines += ["", total_row]
        if any(layer.shares for layer in capacity.layers):
            lines.append("shared: uses the bases of a layer above, which counts their bytes")
        sharing: dict[str, list[str]] = {}
        for layer in capacity.layers:
            sharing.setdefault(layer.shares or layer.layer, []).append(layer.layer)
        shared = _count_kinds([", ".join(names) for names in sharing.values() if len(names) > 1])
        lines += _list_names("Layers that read the same input share their bases:", shared)
        tied = [
            ", ".join(names) + (" (used from both sides)" if weight in capacity.two_sided else "")
            for weight, names in capacity.tied.items()
        ]
        lines += _list_names("Layers that share one weight, which is projected for the inputs of each:", tied)
        # A parameter that was never trained, such as the base of a LoRA, is not frozen by the memory.
        frozen = {name: why for name, why in capacity.frozen.items() if why != NOT_TRAINED}
        lines += _list_reasons("Frozen after the first task:", frozen)
        lines += _list_reasons("Not protected: changes freely, so old tasks drift:", capacity.free)
        return "\n".join(lines)

    __repr__ = __str__


def _make_rows(capacity: Capacity) -> list[tuple[str, ...]]:
    """Return a row for each kind of layers, whose names differ in numbers only."""
    kinds: dict[tuple[str, int, bool], list[LayerCapacity]] = {}
    for layer in capacity.layers:
        kinds.setdefault((generalize_name(layer.layer), layer.dimension, layer.shares is None), []).append(layer)
    return [
        (
            merge_names([layer.layer for layer in layers]),
            str(len(layers)),
            f"{_format_range([layer.bases for layer in layers])} / {dimension}",
            _format_range([layer.blocked for layer in layers]),
            _format_range([layer.free for layer in layers], ".1%"),
            format_bytes(sum(layer.bytes for layer in layers)) if is_own else "shared",
        )
        for (_, dimension, is_own), layers in kinds.items()
    ]


def generalize_name(name: str) -> str:
    """Return a name with a star instead of each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def merge_names(names: Sequence[str]) -> str:
    """Return one name for names that differ in numbers only, with a star for each number that differs."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(values[0] if len(set(values)) == 1 else "*" for values in parts)


def _count_kinds(names: Sequence[str]) -> list[str]:
    """Return one name, with a count, for all names that differ in numbers only."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(generalize_name(name), []).append(name)
    return [
        merge_names(members) + (f" ({len(members)} times)" if len(members) > 1 else "") for members in kinds.values()
    ]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, with the first column aligned to the left and the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [(row[0].ljust(first), *map(str.rjust, row[1:], others)) for row in rows]
    return ["  ".join(cells).rstrip() for cells in lines]


def group_names(names: Sequence[str]) -> str:
    """Return names in one line; those that differ in numbers only are counted."""
    return ", ".join(_count_kinds(names))


def _list_names(title: str, names: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {name}" for name in names)] if names else []


def _list_reasons(title: str, reasons: Mapping[str, str]) -> list[str]:
    """Return lines with the parameters by reason; names that differ in numbers only are counted."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    lines = ["", title] if reasons else []
    for reason, names in by_reason.items():
        listed = ", ".join(_count_kinds(names))
        # No name is broken, however long it is.
        wrapped = wrap(listed, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {reason}", *(f"    {line}" for line in wrapped)]
    return lines


def _format_range(values: Sequence[float], style: str = "") -> str:
    least, most = format(min(values), style), format(max(values), style)
    return least if least == most else f"{least} to {most}"


def format_bytes(count: int) -> str:
    """Return a number of bytes with a unit that keeps it short."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
