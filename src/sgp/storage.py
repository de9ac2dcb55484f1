"""State dicts as safetensors files, with a format version and a digest. Nothing in a file is executed."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = 1
# Key of a tensor's entry in the tree; no module or parameter can have this name.
TENSOR = ".tensor"


def write(path: str | os.PathLike[str], state: dict[str, Any], known_digest: str | None = None) -> None:
    """Write a state dict to a file. A write that fails leaves an existing file unchanged.

    Args:
        path: Path of the file.
        state: Nested dicts and lists of tensors and plain values, with an entry ``format``.
        known_digest: Digest of the state, if it is known already.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: The file cannot be written; the error names it.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {os.fspath(path)!r}: the folder does not exist, create it first")
    tensors, tree = _flatten(state)
    header = {"sgp": json.dumps({"tree": tree, "digest": known_digest or _digest(tree, tensors)})}
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata=header)
    write_bytes(target, data)


def write_bytes(target: Path, data: bytes) -> None:
    """Write a file and sync it to the disk. A write that fails leaves an existing file unchanged."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # that of a write has no name, others a temporary one
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(target)) from error
        raise
    if os.name == "posix":  # a renamed file is on the disk once its folder is synced
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def digest(state: dict[str, Any]) -> str:
    """Return a digest of a state dict, which does not depend on the file that it is in."""
    tensors, tree = _flatten(state)
    return _digest(tree, tensors)


def read(path: str | os.PathLike[str], what: str = "saved memory", digest: str = "") -> dict[str, Any]:
    """Read the state dict of a file.

    Args:
        path: Path of the file.
        what: Kind of the file's content, for messages.
        digest: Digest of the content that is expected, or its beginning.

    Returns:
        The state dict.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is truncated, damaged, of another kind, or of a newer format.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {what} at {os.fspath(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["sgp"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        tree, expected = header["tree"], header["digest"]
        version = int(tree["format"])
        state: dict[str, Any] = _unflatten(tree, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{os.fspath(path)!r} is truncated, damaged or not a {what} ({reason})") from error
    if version > FORMAT:
        raise ValueError(f"{os.fspath(path)!r} has format {version}; this version of sgp reads formats up to {FORMAT}")
    if expected != _digest(tree, tensors) or not expected.startswith(digest):
        raise ValueError(f"{os.fspath(path)!r} is damaged: its content does not match its digest")
    return state


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a state dict by number, and a tree in which these numbers replace them."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value
            return {TENSOR: str(len(tensors) - 1)}
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value

    return tensors, walk(state)


def _unflatten(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {TENSOR}:
            return tensors[tree[TENSOR]]
        return {key: _unflatten(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_unflatten(item, tensors) for item in tree]
    return tree


def _digest(tree: Any, tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return sha.hexdigest()
