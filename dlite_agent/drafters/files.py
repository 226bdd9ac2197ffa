"""Reading and writing the two files of a drafter's folder, field by field: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dlite_agent.errors import DrafterFormatError

M = TypeVar("M", bound=nn.Module)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; a `DrafterFormatError` says what is wrong."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise DrafterFormatError(f"{path} does not exist; expected a folder with a DLite checkpoint") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DrafterFormatError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(fields, dict):
        raise DrafterFormatError(f"{path} holds a {type(fields).__name__}; expected an object")
    return fields


def require(fields: Mapping[str, Any], name: str, kind: type, *, where: str) -> Any:
    """Return a field of a type; a `DrafterFormatError` names it otherwise."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DrafterFormatError(f"{where}.{name} is {value!r}; expected {kind.__name__}")
    return value


def expect(got: object, expected: object, *, field: str) -> None:
    """Raise a `DrafterFormatError` that names the field if it is not what was expected."""
    if got != expected:
        raise DrafterFormatError(f"{field} is {got!r}; expected {expected!r}")


def flag(fields: Mapping[str, Any], name: str, *, where: str) -> bool:
    """Return a field that is true or false."""
    value = fields.get(name)
    if not isinstance(value, bool):
        raise DrafterFormatError(f"{where}.{name} is {value!r}; expected true or false")
    return value


def name_list(fields: Mapping[str, Any], name: str, *, where: str) -> tuple[str, ...]:
    """Return a field that lists names; empty if it is not there."""
    names = fields.get(name, [])
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise DrafterFormatError(f"{where}.{name} is {names!r}; expected a list of names")
    return tuple(names)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read one safetensors file, or the shards that its index names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = require(read_json(index), "weight_map", dict, where="index")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise DrafterFormatError(f"{index} names the file {name!r}; expected a file of the same folder")
        names = sorted(set(weight_map.values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise DrafterFormatError(f"{folder / name} cannot be read ({error}); fetch the checkpoint again") from error
    return tensors


def load_weights(folder: Path, build: Callable[[], M], *, vocab_size: int, dtype: torch.dtype | None) -> M:
    """Return a model with the weights of a folder.

    Args:
        folder: Holds model.safetensors, or shards and their index.
        build: Makes the model; called where tensors have no content yet.
        vocab_size: The target's, for the ids of a reduced vocabulary if the model has one.
        dtype: Compute type; None keeps the stored one.

    Raises:
        DrafterFormatError: If the weights are damaged, incomplete or of another model.
    """
    tensors = _read_tensors(folder)
    with torch.device("meta"):
        model = build()
    _check_tensors(folder, tensors, model.state_dict())
    if "draft_to_target" in tensors:
        _check_draft_vocabulary(tensors["draft_to_target"], vocab_size=vocab_size)
    model.load_state_dict(tensors, assign=True)
    return model if dtype is None else model.to(dtype)


def write_folder(model: nn.Module, folder: Path, fields: Mapping[str, Any], *, dtype: torch.dtype | None) -> None:
    """Write a model's weights, floats in a type where one is given, and its configuration; the folder may be new."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(dtype if tensor.is_floating_point() and dtype else tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")


def _check_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare names, shapes and kinds of tensors with those of a model; a `DrafterFormatError` names the first."""
    for name, like in wanted.items():
        if name not in tensors:
            raise DrafterFormatError(f"{folder} lacks the tensor {name} {list(like.shape)}")
        got = tensors[name]
        if got.shape != like.shape:
            raise DrafterFormatError(
                f"{folder}: tensor {name} has shape {list(got.shape)}; expected {list(like.shape)}"
            )
        if got.is_floating_point() != like.is_floating_point():
            kind = "a float type" if like.is_floating_point() else str(like.dtype)
            raise DrafterFormatError(f"{folder}: tensor {name} has dtype {got.dtype}; expected {kind}")
    if unknown := sorted(set(tensors) - set(wanted)):
        raise DrafterFormatError(f"{folder}: tensors {unknown[:4]} are not part of its version")


def _check_draft_vocabulary(draft_to_target: torch.Tensor, *, vocab_size: int) -> None:
    """Refuse ids that the target does not have, and an order in which they cannot be looked up."""
    if draft_to_target.dtype != torch.int32:
        raise DrafterFormatError(f"tensor draft_to_target has dtype {draft_to_target.dtype}; expected torch.int32")
    if draft_to_target[0] < 0 or draft_to_target[-1] >= vocab_size or (draft_to_target.diff() < 1).any():
        raise DrafterFormatError(f"draft_to_target holds no ascending ids 0..{vocab_size - 1}")
