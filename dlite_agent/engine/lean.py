"""Decoder layers in fewer operations: the arithmetic of transformers' own, without what a pass over few rows pays for.

A decode step of a small model spends a third of its time between the products: calls of modules inside modules, norms
and rotations in many small operations. Families whose layers are norm, attention, norm, MLP get layers of one module
here. Parameters stay where they were, under their names. Such a model serves the engine: one row of tokens and a cache.
Forward hooks on its layers and linears are called, those on attentions, MLPs and the layers' norms are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dlite_agent.engine.packed import Segment

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class _Rotation:
    """The sines of a pass with the sign of their half, made once for all layers.

    Rotating by halves, [x1, x2] -> [-x2, x1], times the sines is the same as exchanging them, times sines of which the
    first half is negative.
    """

    def __init__(self) -> None:
        self._sin: torch.Tensor | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines `[1, 1, n, head_dim]` of transformers' `[1, n, head_dim]`."""
        if self._tables is None or self._sin is not sin:
            first, second = sin.chunk(2, dim=-1)
            self._sin, self._tables = sin, (cos.unsqueeze(1), torch.cat([-first, second], dim=-1).unsqueeze(1))
        return self._tables


class LeanLayer(nn.Module):
    """Takes the place of a decoder layer of one of `FAMILIES`, in float32."""

    def __init__(self, layer: Any, rotation: _Rotation) -> None:
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self._rotation = rotation
        self._head_dim: int = layer.self_attn.head_dim
        self._scaling: float = layer.self_attn.scaling
        self._window = _window_of(layer.self_attn)
        self._has_head_norms = hasattr(layer.self_attn, "q_norm")

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, n, hidden]
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        segments: Sequence[Segment] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the layer's output, of the same shape; what else transformers passes along is not needed here."""
        attention, mlp = self.self_attn, self.mlp
        normed = _normed(hidden_states, self.input_layernorm)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (self._heads(project(normed)) for project in projections)
        if self._has_head_norms:
            query, key = _normed(query, attention.q_norm), _normed(key, attention.k_norm)
        cos, sin = self._rotation.tables(*position_embeddings)
        query, key = (_rotated(x, cos, sin) for x in (query, key))
        key, value = cache.update(key, value, attention.layer_idx)
        attend: Any = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        mixed, _ = attend(
            attention, query, key, value, None, scaling=self._scaling, sliding_window=self._window, segments=segments
        )
        hidden_states = hidden_states + attention.o_proj(mixed.reshape(1, hidden_states.shape[1], -1))
        normed = _normed(hidden_states, self.post_attention_layernorm)
        out: torch.Tensor = hidden_states + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[1, heads, n, head_dim]` of `[1, n, heads * head_dim]`."""
        return x.view(1, x.shape[1], -1, self._head_dim).transpose(1, 2)


def _window_of(attention: Any) -> int | None:
    """Return the window that transformers' own attention takes; a key of the configuration alone means nothing."""
    if attention.config.model_type == "mistral":
        return getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", None)


def _normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # Not fused: a fused product and sum may round the last elements of a tensor in another way.
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def make_lean(model: PreTrainedModel) -> None:
    """Replace the decoder layers of a float32 model on the CPU where they are known; leave all others as they are.

    Their linears and activations must have been replaced before.
    """
    if model.config.model_type not in FAMILIES or model.dtype != torch.float32 or model.device.type != "cpu":
        return
    decoder: Any = model.get_decoder()
    rotation = _Rotation()
    decoder.layers = nn.ModuleList([LeanLayer(layer, rotation) for layer in decoder.layers])
