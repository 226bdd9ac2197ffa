"""Which model families are exact under speculation; everything else is refused at load, never silently wrong.

A family is here once the rollback tests hold for it: after a crop to any row, what comes next is what a fresh prefill
gives, with our attention and our cache in the place of transformers' own.
"""

from __future__ import annotations

from typing import Any

from dlite_agent.engine.recurrent import CONVOLUTION, DELTA_RULE
from dlite_agent.errors import UnsupportedModelError

SLAB_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "phi3",
)
RECURRENT_FAMILIES = {"lfm2": CONVOLUTION, "qwen3_5_text": DELTA_RULE}  # and the layer type that carries their state
FAMILIES = (*SLAB_FAMILIES, *RECURRENT_FAMILIES)
_ALIGNED_DIM = 4  # 16 bytes of float32
_EXACT_ROPE = ("default", "linear", "llama3", "yarn")


def refuse_inexact(config: Any, *, is_rowwise: bool) -> None:
    """Refuse what was not shown to give the same tokens after a crop.

    Args:
        config: A model's configuration; of a model for text and images as a whole, only its text part is used.
        is_rowwise: Whether a row must get the very same bits alone and beside others, as int8 and exact=True need.

    Raises:
        UnsupportedModelError: It names what is not exact, and what to use instead.
    """
    if method := (getattr(config, "quantization_config", None) or {}):
        name = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise UnsupportedModelError(
            f"weights quantized with {name!r} cannot be read; use the unquantized model (quantize='int8' quantizes it)"
        )
    config = getattr(config, "text_config", None) or config
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} was not shown to be exact under speculation; "
            f"expected one of {', '.join(FAMILIES)}"
        )
    if is_rowwise and config.model_type in RECURRENT_FAMILIES:
        raise UnsupportedModelError(
            f"a row of a {config.model_type!r} model does not get the same bits alone and beside others, which int8 "
            "weights and exact=True rely on; load it without quantize and exact"
        )
    if is_rowwise:
        _refuse_unaligned(config)
    _refuse_layers(config)
    _refuse_rope(config)
    _refuse_attention(config)


def _refuse_unaligned(config: Any) -> None:
    """Refuse heads whose rows begin anywhere in memory: the last bits of their attention depend on where."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % _ALIGNED_DIM:
        raise UnsupportedModelError(
            f"heads of {head_dim} elements do not give a row the same bits everywhere, which int8 weights and "
            f"exact=True rely on; expected a multiple of {_ALIGNED_DIM}, or load it without quantize and exact"
        )


def _refuse_layers(config: Any) -> None:
    """Refuse kinds of layers that the family's cache does not have."""
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    recurrent = RECURRENT_FAMILIES.get(config.model_type)
    expected = ("full_attention", "sliding_attention") if recurrent is None else ("full_attention", recurrent)
    if unknown := sorted(set(layer_types).difference(expected)):
        raise UnsupportedModelError(
            f"layers of type {unknown[0]!r} in a {config.model_type!r} model; expected {' or '.join(expected)} only"
        )
    if recurrent is not None and "full_attention" not in layer_types:
        raise UnsupportedModelError(
            f"a {config.model_type!r} model without an attention layer has no row count; use one that has some"
        )


def _refuse_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    variants = [parameters] if "rope_type" in parameters else [v for v in parameters.values() if isinstance(v, dict)]
    for variant in variants:
        if variant.get("rope_type", "default") not in _EXACT_ROPE:
            raise UnsupportedModelError(
                f"RoPE type {variant['rope_type']!r} changes old keys as the text grows; expected one of {_EXACT_ROPE}"
            )


def _refuse_attention(config: Any) -> None:
    """Refuse what `engine.attention` does not compute."""
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError("bidirectional attention cannot be decoded token by token; use a causal model")
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        raise UnsupportedModelError(f"attention scores capped at {cap} are not computed here; use a model without")
