"""What a memory protects and what it does not, as data and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sgp.projection.layout import Layout
from sgp.projection.subspace import Bases


@dataclass(frozen=True)
class LayerCapacity:
    """One guarded block.

    Attributes:
        layer: its name.
        bases: how many bases it has.
        dimension: how many it can have: its input dimension, the constant of a protected bias included.
        blocked: how many have importance 1.
        free: one minus the mean importance over all dimensions.
        bytes: what its bases and importances take; a subspace shared between blocks counts with the first.
        shares: the layer whose subspace this is, if not its own.
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
    """A whole memory.

    Attributes:
        layers: the guarded blocks, in the model's order.
        frozen: parameter -> why it does not move after the first task.
        free: parameter -> why it moves without protection.
        tied: weight -> the modules that have it, where they are several. It is projected for the inputs of each.
        two_sided: those of the tied weights that an embedding and an output layer meet from both sides.
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


def capacity_of(
    layout: Layout,
    subspaces: Mapping[str, Bases],
    dimensions: Mapping[str, tuple[int, int]],
    owners: Mapping[str, Sequence[str]],
) -> Capacity:
    """Sum a memory up.

    Args:
        layout: of the model.
        subspaces: by guard.
        dimensions: groups and dimension of each guard, for those without bases.
        owners: of each guarded weight, the modules that have it.
    """
    layers = []
    owner: dict[int, str] = {}
    for name in layout.guards:
        groups, dimension = dimensions[name]
        subspace = subspaces.get(name)
        if subspace is None:
            layers.append(LayerCapacity(name, 0, groups * dimension, 0, 1.0, 0))
            continue
        first = owner.setdefault(id(subspace), name)
        layers.append(
            LayerCapacity(
                layer=name,
                bases=int(subspace.rank.sum()),
                dimension=groups * dimension,
                blocked=subspace.blocked,
                free=subspace.free,
                bytes=subspace.nbytes if first == name else 0,
                shares=None if first == name else first,
            )
        )
    statistics = [f"{name}.{leaf}" for name in layout.statistics for leaf in ("running_mean", "running_var")]
    tied = {weight: list(names) for weight, names in owners.items() if len(names) > 1}
    return Capacity(
        layers,
        frozen=layout.frozen | dict.fromkeys(statistics, "running statistics, norm"),
        free=dict(layout.free),
        tied=tied,
        two_sided=[weight for weight in tied if weight in layout.two_sided],
    )


def print_table(capacity: Capacity, tasks: int, console: Console) -> None:
    """The memory as a table, then every parameter that it does not protect and why."""
    table = Table(
        title=f"GradientMemory after {tasks} task{'s' * (tasks != 1)}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", overflow="fold")
    for heading in ("bases / dim", "fully blocked", "free", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in capacity.layers:
        size = "shared" if layer.shares else _bytes(layer.bytes)
        bases = f"{layer.bases} / {layer.dimension}"
        table.add_row(Text(layer.layer), bases, str(layer.blocked), f"{layer.free:.1%}", size)
    table.add_section()
    table.add_row("total", "", "", "", _bytes(capacity.bytes))
    if any(layer.shares for layer in capacity.layers):
        table.caption = "shared: the bases of a layer above, which counts their bytes"
    console.print(table)
    groups: dict[str, list[str]] = {}
    for layer in capacity.layers:
        groups.setdefault(layer.shares or layer.layer, []).append(layer.layer)
    if any(len(members) > 1 for members in groups.values()):
        console.print("Layers that read the same input share their bases:", style="bold")
        for members in groups.values():
            if len(members) > 1:
                console.print(Padding(Text(", ".join(members)), (0, 0, 0, 2)))
    if capacity.tied:
        console.print("Layers that have one weight, which is projected for the inputs of each:", style="bold")
        for weight, members in capacity.tied.items():
            sides = " (met from both sides)" if weight in capacity.two_sided else ""
            console.print(Padding(Text(", ".join(members) + sides), (0, 0, 0, 2)))
    for title, names in (
        ("Frozen after the first task", capacity.frozen),
        ("Not protected: moves freely, so what it does for old tasks drifts", capacity.free),
    ):
        if not names:
            continue
        console.print(f"{title}:", style="bold")
        by_reason: dict[str, list[str]] = {}
        for name, reason in names.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, members in by_reason.items():
            console.print(Padding(Text(reason), (0, 0, 0, 2)))
            console.print(Padding(Text(", ".join(members)), (0, 0, 0, 4)))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
