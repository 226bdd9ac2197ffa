"""Reading and writing DLite checkpoints: config.json and safetensors, validated field by field.

`dlite_v1` is the published format. `dlite_agent_v1` adds to `dlite_config` the fields `draft_vocab_size`,
`confidence_head` and `mask_embedding`; to the tensors `draft_to_target` (int32, ascending ids), `mask_embedding` and
`sequential_head.confidence_proj.{weight, bias}`; and has `sequential_head.prev_token_proj.weight` (r x d, applied to
the target's embedding) in place of `sequential_head.prev_token_embedding.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlite_agent.drafters.dlite import AGENT_V1, V1, VERSIONS, DLiteConfig, DLiteModel
from dlite_agent.drafters.files import expect, flag, load_weights, name_list, read_json, require, write_folder
from dlite_agent.drafters.history import HistoryConfig
from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.errors import ConfigError, DrafterFormatError, DrafterMismatchError

VERSION = V1
_ROLE = "pivot_q_student"
_HEAD = "rnn"
_PLAIN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_target_layers",
    "block_size",
)
_NESTED = ("anchor_group_size", "sequential_rank", "mask_token_id")


def _positive(value: object, *, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise DrafterFormatError(f"{field} is {value!r}; expected a positive number")
    return float(value)


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """Read the RoPE base from either of the two places that configs have it in."""
    nested = fields.get("rope_parameters") or {}
    if not isinstance(nested, dict):
        raise DrafterFormatError(f"config.rope_parameters is {nested!r}; expected dict")
    expect(nested.get("rope_type", "default"), "default", field="rope_parameters.rope_type")
    return _positive(nested.get("rope_theta", fields.get("rope_theta")), field="rope_theta")


def read_config(folder: Path) -> DLiteConfig:
    """Read and validate a checkpoint's configuration.

    Raises:
        DrafterFormatError: Naming the field, what it is and what was expected.
    """
    fields = read_json(folder / "config.json")
    nested = require(fields, "dlite_config", dict, where="config")
    version = nested.get("architecture_version")
    if version not in VERSIONS:
        raise DrafterFormatError(
            f"dlite_config.architecture_version is {version!r}; expected {' or '.join(map(repr, VERSIONS))}"
        )
    expect(nested.get("model_role"), _ROLE, field="dlite_config.model_role")
    expect(nested.get("sequential_head"), _HEAD, field="dlite_config.sequential_head")
    plain = {name: require(fields, name, int, where="config") for name in _PLAIN}
    inner = {name: require(nested, name, int, where="dlite_config") for name in _NESTED}
    layer_ids = tuple(require(nested, "target_layer_ids", list, where="dlite_config"))
    expect(nested.get("chs_num_layers"), len(layer_ids), field="dlite_config.chs_num_layers")
    if fields.get("head_dim") is None:
        head_dim = plain["hidden_size"] // max(1, plain["num_attention_heads"])
    else:
        head_dim = require(fields, "head_dim", int, where="config")
    try:
        rule = pivot_layer_ids(plain["num_target_layers"], len(layer_ids))
        expect(layer_ids, rule, field="dlite_config.target_layer_ids")
        return DLiteConfig(
            **plain,
            **inner,
            target_layer_ids=rule,
            head_dim=head_dim,
            rope_theta=_rope_theta(fields),
            rms_norm_eps=_positive(fields.get("rms_norm_eps", 1e-6), field="rms_norm_eps"),
            attention_bias=bool(fields.get("attention_bias", False)),
            **_extensions(nested, version),
        )
    except ConfigError as error:
        raise DrafterFormatError(f"{folder / 'config.json'}: {error}") from error


def _extensions(nested: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Read the fields that only our own version has."""
    if version != AGENT_V1:
        return {}
    return {
        "version": version,
        "draft_vocab_size": require(nested, "draft_vocab_size", int, where="dlite_config"),
        "has_confidence": flag(nested, "confidence_head", where="dlite_config"),
        "has_mask_embedding": flag(nested, "mask_embedding", where="dlite_config"),
    }


def load(folder: Path, *, dtype: torch.dtype | None = None) -> DLiteModel:
    """Load a checkpoint of any of `VERSIONS`.

    Args:
        folder: Holds config.json and model.safetensors, or shards and their index.
        dtype: Compute type; None keeps the stored one.

    Raises:
        DrafterFormatError: If the checkpoint is damaged, incomplete or of another format.
    """
    config = read_config(folder)
    return load_weights(folder, lambda: DLiteModel(config), vocab_size=config.vocab_size, dtype=dtype)


def read_target_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the targets that a checkpoint was trained for; empty where it does not say.

    Raises:
        DrafterFormatError: If its configuration cannot be read.
    """
    nested = require(read_json(folder / "config.json"), "dlite_config", dict, where="config")
    return name_list(nested, "target_names", where="dlite_config")


def save(
    model: DLiteModel, folder: Path, *, dtype: torch.dtype | None = None, target_names: Sequence[str] = ()
) -> None:
    """Write a model as a checkpoint of its configuration's version.

    Args:
        model: What to write.
        folder: Created if need be.
        dtype: Type to store the weights in; None keeps theirs.
        target_names: What the target is called: a registry name, a hub id.
    """
    config = model.config
    fields: dict[str, Any] = {name: getattr(config, name) for name in _PLAIN}
    for name in ("head_dim", "rope_theta", "rms_norm_eps", "attention_bias"):
        fields[name] = getattr(config, name)
    fields |= {"architectures": ["DLiteDraftModel"], "model_type": "qwen3"}
    fields["dlite_config"] = {
        "architecture_version": config.version,
        "model_role": _ROLE,
        "chs_num_layers": len(config.target_layer_ids),
        "target_layer_ids": list(config.target_layer_ids),
        "sequential_head": _HEAD,
        **{name: getattr(config, name) for name in _NESTED},
    }
    if config.version == AGENT_V1:
        fields["dlite_config"] |= {
            "draft_vocab_size": config.draft_vocab_size,
            "confidence_head": config.has_confidence,
            "mask_embedding": config.has_mask_embedding,
        }
    if target_names:
        fields["dlite_config"]["target_names"] = list(target_names)
    write_folder(model, folder, fields, dtype=dtype)


def check_target(config: DLiteConfig | HistoryConfig, *, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        DrafterMismatchError: Naming the field, the drafter's value and the target's.
    """
    pairs = {
        "hidden_size": (config.hidden_size, hidden_size),
        "vocab_size": (config.vocab_size, vocab_size),
        "num_target_layers": (config.num_target_layers, num_layers),
    }
    for field, (got, expected) in pairs.items():
        if got != expected:
            raise DrafterMismatchError(
                f"the drafter's {field} is {got} and the target's {expected}; use a drafter trained for this target"
            )
