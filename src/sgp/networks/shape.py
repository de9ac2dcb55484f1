"""The shape of one input, as a network knows it."""

from collections.abc import Collection


def refuse_other_shapes(network: str, inputs: tuple[int, ...], known: Collection[tuple[int, ...]]) -> None:
    """Raise when a network was not made for inputs of this shape."""
    if tuple(inputs) not in known:
        raise ValueError(f"{network} takes inputs of shape {' or '.join(map(str, known))}, got {tuple(inputs)}")
