"""What the two baselines with a history share: layers over a cache of their own, a cache for each text, a vocabulary.

They are what DLite is measured against. Their keys and values grow with every token of the context, must follow every
change of it, and are gone with the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.drafters.layers import Attention, Layer, RMSNorm, Rope, Shape, rope_tables
from dlite_agent.errors import ConfigError

Kind = Literal["dspark", "independent"]
KINDS: tuple[Kind, ...] = ("dspark", "independent")
_FIRST_CAPACITY = 512

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values `[1, kv heads, rows, head_dim]` of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig(Shape):
    """Shape of a baseline.

    Attributes:
        kind: Which baseline.
        num_target_layers: L, the target's layer count.
        target_layer_ids: The S target layers that it reads; none for "independent".
        num_drafts: K, the most tokens one draft can have.
        draft_vocab_size: V_d, how many tokens it can write.
        rank: r of the Markov head; 0 for "independent".
    """

    kind: Kind
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    num_drafts: int
    draft_vocab_size: int
    rank: int

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; expected {' or '.join(KINDS)}")
        reads = self.kind == "dspark"
        if bool(self.target_layer_ids) != reads or (self.rank > 0) != reads:
            raise ConfigError(
                f"target_layer_ids {self.target_layer_ids} and rank {self.rank}; expected "
                f"{'both' if reads else 'neither'} for {self.kind}"
            )
        if self.num_drafts < 1:
            raise ConfigError(f"num_drafts is {self.num_drafts}; expected at least 1")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}; expected 1..{self.vocab_size}")


class Before(Protocol):
    """Keys and values of the rows that a block may look back at."""

    @property
    def length(self) -> int:
        """How many rows."""
        ...

    def join(self, layer: int, rows: Rows) -> Rows:
        """Return a layer's keys and values with the block's own behind them."""
        ...


class FixedRows:
    """Rows that stay as they are, to train on."""

    def __init__(self, layers: Sequence[Rows]) -> None:
        self._layers = layers
        self.length = layers[0][0].shape[2]

    def join(self, layer: int, rows: Rows) -> Rows:
        """Return both, copied."""
        key, value = self._layers[layer]
        return torch.cat([key, rows[0]], dim=2), torch.cat([value, rows[1]], dim=2)


class KeyValues:
    """Keys and values of one text in all layers; grows by doubling.

    Attributes:
        length: Rows that count; what lies behind them is scratch.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self._layers: list[Rows | None] = [None] * num_layers

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for rows in self._layers if rows is not None for tensor in rows)

    def join(self, layer: int, rows: Rows) -> Rows:
        """Write a block's rows behind those that count, and return views of all."""
        stop = self.length + rows[0].shape[2]
        slabs = self._layers[layer]
        if slabs is None or slabs[0].shape[2] < stop:
            slabs = self._layers[layer] = self._grown(slabs, rows, max(stop, 2 * self.length, _FIRST_CAPACITY))
        for slab, new in zip(slabs, rows, strict=True):
            slab[:, :, self.length : stop] = new
        return slabs[0][:, :, :stop], slabs[1][:, :, :stop]

    def keep(self, num_rows: int) -> None:
        """Let so many of the rows that were joined count."""
        self.length += num_rows

    def crop(self, length: int) -> None:
        """Let no row beyond `length` count."""
        self.length = min(self.length, length)

    def _grown(self, slabs: Rows | None, like: Rows, capacity: int) -> Rows:
        grown = tuple(new.new_empty(*new.shape[:2], capacity, new.shape[3]) for new in like)
        if slabs is not None:
            for old, new in zip(slabs, grown, strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
        return grown[0], grown[1]


class _Layer(Layer):
    def forward(
        self, x: torch.Tensor, rope: Rope, before: Before, index: int, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Rows]:
        normed = self.input_layernorm(x)
        rows = self.self_attn.keys_values(normed, rope)
        x = x + self.self_attn(normed, rope, *before.join(index, rows), mask)
        return x + self.mlp(self.post_attention_layernorm(x)), rows


class HistoryModel(nn.Module):
    """Layers that let blocks of new slots look back at the rows of a text."""

    draft_to_target: torch.Tensor

    def __init__(self, config: HistoryConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.register_buffer("draft_to_target", torch.arange(config.draft_vocab_size, dtype=torch.int32))

    def keys_values(self, slots: torch.Tensor, positions: torch.Tensor) -> list[Rows]:
        """Return each layer's keys and values of `slots [1, T, d]` that come from outside, at absolute positions."""
        rope, attentions = self.rope(positions), [layer.self_attn for layer in self.layers]
        return [attention.keys_values(slots, rope) for attention in attentions if isinstance(attention, Attention)]

    def rope(self, positions: torch.Tensor) -> Rope:
        """Return the tables of absolute `positions [T]`."""
        config, dtype = self.config, self.norm.weight.dtype
        return rope_tables(positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=dtype)

    def blocks(
        self, slots: torch.Tensor, positions: torch.Tensor, before: Before, *, is_causal: bool
    ) -> tuple[torch.Tensor, list[Rows]]:
        """Run blocks of one text; each sees the rows before its own first position, and itself.

        Args:
            slots: `[m, T, d]`.
            positions: `[m, T]`, absolute.
            before: Rows of the text.
            is_causal: Whether a slot sees the block's later slots.

        Returns:
            Normed hidden states `[m, T, d]`; keys and values of each layer, `m * T` rows.
        """
        num_blocks, length = positions.shape
        mask = None
        if num_blocks > 1 or (is_causal and length > 1) or int(positions[0, 0]) < before.length:
            mask = _mask(positions, before.length, is_causal=is_causal)
        rope, x, every = self.rope(positions.flatten()), slots.flatten(0, 1).unsqueeze(0), []
        for index, layer in enumerate(self.layers):
            x, rows = layer(x, rope, before, index, mask)
            every.append(rows)
        return self.norm(x).view(num_blocks, length, -1), every


def _mask(positions: torch.Tensor, num_before: int, *, is_causal: bool) -> torch.Tensor:
    """Return `[m * T, num_before + m * T]`, true where a slot may look."""
    num_blocks, length = positions.shape
    first = positions[:, :1].expand(-1, length).reshape(-1, 1)
    past = torch.arange(num_before, device=positions.device) < first
    slots = torch.arange(num_blocks * length, device=positions.device)
    own = slots.unsqueeze(1) // length == slots // length
    return torch.cat([past, own & (slots <= slots.unsqueeze(1)) if is_causal else own], dim=1)


def head_logits(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return `[..., V_d]` from `hidden [..., d]` and the target's own output rows `head [V_d, d]`."""
    return functional.linear(hidden, head)


def rows_as_linear(head: torch.Tensor) -> nn.Sequential:
    """Return a module that does what `head_logits` does, for drafting; training shares the rows as they are.

    The linear is inside another module, where `Target.calibrate` can put a faster one in its place.
    """
    linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(head, requires_grad=False)
    return nn.Sequential(linear)
