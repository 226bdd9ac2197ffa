"""Checkpoints of the two baselines, `dspark` and `independent`: config.json and one file of safetensors.

config.json holds `baseline` (the kind), the fields of `HistoryConfig`, and `target_names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from dlite_agent.drafters.dspark import DSparkModel
from dlite_agent.drafters.files import flag, load_weights, name_list, read_json, require, write_folder
from dlite_agent.drafters.history import HistoryConfig, HistoryModel
from dlite_agent.drafters.independent import IndependentModel
from dlite_agent.errors import ConfigError, DrafterFormatError

_FLOATS = ("rope_theta", "rms_norm_eps")


def is_baseline(folder: Path) -> bool:
    """Tell a baseline's folder from one of a DLite drafter.

    Raises:
        DrafterFormatError: If its configuration cannot be read.
    """
    return "baseline" in read_json(folder / "config.json")


def read_config(folder: Path) -> HistoryConfig:
    """Read and validate a checkpoint's configuration.

    Raises:
        DrafterFormatError: Naming the field, what it is and what was expected.
    """
    content = read_json(folder / "config.json")
    values: dict[str, Any] = {"kind": require(content, "baseline", str, where="config")}
    for field in fields(HistoryConfig):
        if field.name != "kind":
            values[field.name] = _value(content, field.name)
    try:
        return HistoryConfig(**values)
    except ConfigError as error:
        raise DrafterFormatError(f"{folder / 'config.json'}: {error}") from error


def _value(content: Mapping[str, Any], name: str) -> Any:
    if name in _FLOATS:
        return float(require(content, name, float, where="config"))
    if name == "attention_bias":
        return flag(content, name, where="config")
    if name != "target_layer_ids":
        return require(content, name, int, where="config")
    ids = require(content, name, list, where="config")
    if not all(type(i) is int for i in ids):
        raise DrafterFormatError(f"config.{name} is {ids!r}; expected layer numbers")
    return tuple(ids)


def read_target_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the targets that a checkpoint was trained for.

    Raises:
        DrafterFormatError: If its configuration cannot be read.
    """
    return name_list(read_json(folder / "config.json"), "target_names", where="config")


def new_model(config: HistoryConfig) -> HistoryModel:
    """Return a model of a kind, its weights not yet set up for anything."""
    return DSparkModel(config) if config.kind == "dspark" else IndependentModel(config)


def load(folder: Path, *, dtype: torch.dtype | None = None) -> HistoryModel:
    """Load a checkpoint.

    Args:
        folder: Holds config.json and model.safetensors.
        dtype: Compute type; None keeps the stored one.

    Raises:
        DrafterFormatError: If the checkpoint is damaged, incomplete or of another format.
    """
    config = read_config(folder)
    return load_weights(folder, lambda: new_model(config), vocab_size=config.vocab_size, dtype=dtype)


def save(
    model: HistoryModel, folder: Path, *, dtype: torch.dtype | None = None, target_names: Sequence[str] = ()
) -> None:
    """Write a model; the arguments are those of `checkpoint.save`."""
    content = asdict(model.config)
    content = {"baseline": content.pop("kind"), **content, "target_names": list(target_names)}
    write_folder(model, folder, content, dtype=dtype)
