"""YAML files of plain values."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any


def load_yaml(path: Path | Traversable) -> Any:
    """Load the plain values of a YAML file. Nothing in the file is executed.

    Args:
        path: File to read.

    Returns:
        What the file contains; None if it is empty.

    Raises:
        ValueError: The file is not YAML, or has a name twice, of which YAML would take the last.
    """
    # Imported here: the core needs no YAML.
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        for entries in _find_mappings(node, yaml.MappingNode):
            names = [name.value for name, _ in entries if isinstance(name, yaml.ScalarNode)]
            duplicates = sorted({name for name in names if names.count(name) > 1})
            if duplicates:
                raise ValueError(f"{path} has {' and '.join(duplicates)} twice")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error


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
