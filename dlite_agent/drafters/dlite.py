"""The DLite drafter: history-free drafting from the hidden states the target has just computed.

After "DLite: History-free Speculative Decoding for Agentic AI" (SJTU-DAI-Sys/DLite), written from its formulas. One
[S, d] row of target hidden states (the pivot) is the whole context: S key/value slots, G anchor queries and K mask
queries attend to each other in N small layers, then a light recurrent head restores order inside the block. The cost
per draft is O(S + K) whatever the context length, positions are local, and nothing is kept between two drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.drafters.protocol import DraftView, Proposal
from dlite_agent.errors import ConfigError

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sequential_rank",
)


@dataclass(frozen=True, slots=True)
class DLiteConfig:
    """Shape of a DLite drafter; the names are those of its checkpoint.

    Attributes:
        hidden_size: d, the target's hidden size.
        num_target_layers: L, the target's layer count.
        target_layer_ids: The S target layers whose pivot rows are the context.
        block_size: K + 1, the anchor and the tokens drafted at once.
        anchor_group_size: G, 1 for the anchor alone, 2 for its predecessor too.
        sequential_rank: r, width of the recurrent head.
        mask_token_id: Row of the target's embedding that stands for "draft here".
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    anchor_group_size: int
    sequential_rank: int
    mask_token_id: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number")
        if self.anchor_group_size not in (1, 2):
            raise ConfigError(f"anchor_group_size is {self.anchor_group_size}; expected 1 or 2")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}; expected at least 2 (the anchor and one draft)")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id is {self.mask_token_id}; expected 0..{self.vocab_size - 1}")

    @property
    def num_drafts(self) -> int:
        """K, the most tokens one draft can have."""
        return self.block_size - 1


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class _Attention(nn.Module):
    """Queries of the block over [context ; block], all slots seeing all."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(
        self, block: torch.Tensor, context: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Attend; `block [B, T, d]`, `context [B, S, d]`, rope tables `[S + T, head_dim]`."""
        slots = torch.cat([context, block], dim=1)
        cos, sin = rope
        num_context = context.shape[1]
        query = self.q_norm(self._heads(self.q_proj(block)))
        key = self.k_norm(self._heads(self.k_proj(slots)))
        value = self._heads(self.v_proj(slots))
        query = _rotate(query, cos[num_context:], sin[num_context:])
        key = _rotate(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, block: torch.Tensor, context: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, rope)
        out: torch.Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class SequentialHead(nn.Module):
    """A gated recurrence of rank r over the block's tokens, fused with the block's hidden states."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        rank = config.sequential_rank
        self.prev_token_embedding = nn.Embedding(config.vocab_size, rank)
        self.state_proj = nn.Linear(2 * rank, 2 * rank)
        self.state_hidden_mlp = nn.Linear(rank + config.hidden_size, rank)
        self.output_proj = nn.Linear(rank, config.vocab_size, bias=False)

    def start(self, batch: int) -> torch.Tensor:
        """Return the zero state `[batch, r]`."""
        weight = self.state_proj.weight
        return weight.new_zeros(batch, self.prev_token_embedding.embedding_dim)

    def advance(self, state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Take `token [B]` into `state [B, r]`."""
        gate, candidate = self.state_proj(torch.cat([state, self.prev_token_embedding(token)], dim=-1)).chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate)

    def logits(self, state: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[B, vocab]` from `state [B, r]` and `hidden [B, d]`."""
        out: torch.Tensor = self.output_proj(self.state_hidden_mlp(torch.cat([state, hidden], dim=-1)))
        return out


class DLiteModel(nn.Module):
    """The network: local module and sequential head. Embeddings are the target's and are passed in."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.context_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_depth_embedding = nn.Embedding(config.num_target_layers, config.hidden_size)
        self.sequential_head = SequentialHead(config)

    def hidden(self, pivot: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the block's hidden states `[B, K, d]`.

        Args:
            pivot: `[B, S, d]`, target hidden states of the row before the anchor.
            anchors: `[B, G]`, the newest tokens, the anchor last.
            embedding: `[vocab, d]`, the target's.
        """
        config = self.config
        layer_ids = torch.tensor(config.target_layer_ids, device=pivot.device)
        context = self.context_norm(pivot + self.layer_depth_embedding(layer_ids))
        masks = anchors.new_full((anchors.shape[0], config.num_drafts), config.mask_token_id)
        block = functional.embedding(torch.cat([anchors, masks], dim=1), embedding).to(context.dtype)
        rope = self._rope(context.shape[1], block.shape[1], like=block)
        for layer in self.layers:
            block = layer(block, context, rope)
        out: torch.Tensor = self.norm(block)[:, -config.num_drafts :]
        return out

    def start(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return the head's state before the anchor: zero, or one update on the anchor's predecessor."""
        state = self.sequential_head.start(anchors.shape[0])
        return self.sequential_head.advance(state, anchors[:, 0]) if self.config.anchor_group_size == 2 else state

    def greedy(
        self, pivot: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor, *, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft greedily; returns tokens `[B, n]` and logits `[B, n, vocab]` with n at most K."""
        hidden = self.hidden(pivot, anchors, embedding)
        return self._roll(hidden, anchors, num_tokens=num_tokens)

    def forced(self, hidden: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits `[B, n, vocab]` when `tokens [B, n]` are what was drafted."""
        state, previous, logits = self.start(anchors), anchors[:, -1], []
        for k in range(tokens.shape[1]):
            state = self.sequential_head.advance(state, previous)
            logits.append(self.sequential_head.logits(state, hidden[:, k]))
            previous = tokens[:, k]
        return torch.stack(logits, dim=1)

    def _roll(
        self, hidden: torch.Tensor, anchors: torch.Tensor, *, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, previous = self.start(anchors), anchors[:, -1]
        tokens, logits = [], []
        for k in range(min(num_tokens, self.config.num_drafts)):
            state = self.sequential_head.advance(state, previous)
            logits.append(self.sequential_head.logits(state, hidden[:, k]))
            previous = logits[-1].argmax(dim=-1)
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(logits, dim=1)

    def _rope(self, num_context: int, num_block: int, *, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[S + T, head_dim]`: context slots stand at position 0, block slot i at position i."""
        half = torch.arange(0, self.config.head_dim, 2, device=like.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-half / self.config.head_dim)
        positions = torch.cat([like.new_zeros(num_context), torch.arange(num_block, device=like.device)]).float()
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class DLiteDrafter:
    """Drafts from the pivot. Between two proposals it holds weights and nothing else."""

    name = "dlite"

    def __init__(self, model: DLiteModel, embedding: torch.Tensor) -> None:
        """Pair a model with its target's `embedding [vocab, d]`."""
        self.model = model.eval().requires_grad_(False)
        self.embedding = embedding

    @torch.inference_mode()
    def propose(self, view: DraftView) -> Proposal:
        """Draft behind the anchor; nothing where a forced token already stands there or no pivot is known."""
        group = self.model.config.anchor_group_size
        if view.pivot is None or len(view.drafted) or len(view.ids) < group or view.max_tokens < 1:
            return Proposal((), self.name)
        anchors = torch.tensor([view.ids[-group:].tolist()], device=view.pivot.device)
        pivot = view.pivot.unsqueeze(0).to(self.model.norm.weight.dtype)
        tokens, _ = self.model.greedy(pivot, anchors, self.embedding, num_tokens=view.max_tokens)
        return Proposal(tokens[0].tolist(), self.name)
