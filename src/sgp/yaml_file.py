"""YAML files of plain values."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

# Values that a file may have once its aliases are written out. A few lines of aliases of aliases stand for billions.
MOST_VALUES = 100_000
# Beside its own errors, PyYAML raises these for a scalar that is not of the type that its tag says.
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def load_yaml(path: Path | Traversable) -> Any:
    """Load the plain values of a YAML file. Nothing in the file is executed.

    Args:
        path: File to read.

    Returns:
        What the file contains; None if it is empty.

    Raises:
        ValueError: The file is not YAML, has too many values, or has a name twice, of which YAML would take the last.
    """
    # Imported here: the core needs no YAML.
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        size = 0 if node is None else _count_values(node, {})
        content = None if node is None or size > MOST_VALUES else loader.construct_document(node)
    except (yaml.YAMLError, *MALFORMED) as error:
        # The parser's messages have several lines.
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if size > MOST_VALUES:
        raise ValueError(f"{path} has more than {MOST_VALUES:,} values once its aliases are written out")
    for entries in _find_mappings(node, yaml.MappingNode):
        names = [name.value for name, _ in entries if isinstance(name, yaml.ScalarNode)]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"{path} has {' and '.join(duplicates)} twice")
    return content


def _count_values(node: Any, sizes: dict[int, int]) -> int:
    """Return how many values a node stands for, aliases written out except those of a value inside itself.

    Args:
        node: Node of a document.
        sizes: Sizes of the nodes that were counted before, which is extended.
    """
    if id(node) not in sizes:
        sizes[id(node)] = 0
        value = [] if isinstance(node.value, str) else node.value
        children = [each for entry in value for each in (entry if isinstance(entry, tuple) else (entry,))]
        sizes[id(node)] = 1 + sum(_count_values(child, sizes) for child in children)
    return sizes[id(node)]


def _find_mappings(node: Any, kind: type[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield the entries of each mapping in a file once, wherever the mapping stands."""
    seen, left = set(), [node]
    while left:
        node = left.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))
        if isinstance(node, kind):
            yield node.value
            left += [value for _, value in node.value]
        else:
            left += node.value
