"""Building blocks of drafters: Qwen3-style attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.errors import ConfigError

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cos and sin `[T, head_dim]` of T positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a drafter's layers.

    Attributes:
        hidden_size: d, the target's hidden size.
        intermediate_size: Width of the MLP.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads.
        head_dim: Width of a head.
        vocab_size: The target's vocabulary.
        rope_theta: Base of the rotary positions.
        rms_norm_eps: Added to variances.
        attention_bias: Whether the attention's projections have biases.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )


class RMSNorm(nn.RMSNorm):
    """An `nn.RMSNorm` that computes in its weight's type, whatever the products before it were made in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., d]`."""
        return super().forward(x.to(self.weight.dtype))


def rope_tables(positions: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Return the tables of `positions [T]`."""
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), theta ** (-half / head_dim)).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-right, left], dim=-1) * rope[1]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):  # in bfloat16 the way back of a few rows takes six times as long there
        with torch.autocast("cpu", enabled=False):
            return _attend(query.float(), key.float(), value.float(), mask)
    is_grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)


class Attention(nn.Module):
    """Attention with normed queries and keys; keys and values may come from anywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head_dim, bias = shape.hidden_size, shape.head_dim, shape.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.num_attention_heads * head_dim, width, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps=shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=shape.rms_norm_eps)

    def keys_values(self, slots: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[B, kv heads, T, head_dim]` of `slots [B, T, d]`."""
        key = self.k_norm(self._heads(self.k_proj(slots)))
        return _rotate(key, rope), self._heads(self.v_proj(slots))

    def forward(
        self,
        block: torch.Tensor,
        rope: Rope,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let `block [B, T, d]` look at keys and values; `mask [T, slots]` is true where it may."""
        query = _rotate(self.q_norm(self._heads(self.q_proj(block))), rope)
        mixed = _attend(query, key, value, mask)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., d]`."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The parts of a pre-norm layer; what its attention looks at is for each kind of drafter to say."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
