"""The DLite drafter: history-free drafting from the hidden states the target has just computed.

After "DLite: History-free Speculative Decoding for Agentic AI" (SJTU-DAI-Sys/DLite), written from its formulas. One
[S, d] row of target hidden states (the pivot) is the whole context: S key/value slots, G anchor queries and K mask
queries attend to each other in N small layers, then a light recurrent head restores order inside the block. The cost
per draft is O(S + K) whatever the context length, positions are local, and nothing is kept between two drafts.

Two versions share the code. `dlite_v1` is the published one. `dlite_agent_v1` is ours, made for small machines: the
head writes only the `draft_vocab_size` most frequent tokens, its previous-token embedding is a projection of the
target's, and it may have a confidence head and a learned mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.drafters.draws import Draws, draft_places, likeliest
from dlite_agent.drafters.layers import Layer, RMSNorm, Rope, Shape, rope_tables
from dlite_agent.drafters.protocol import DraftView, Proposal
from dlite_agent.errors import ConfigError

V1 = "dlite_v1"
AGENT_V1 = "dlite_agent_v1"
VERSIONS = (V1, AGENT_V1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DLiteConfig(Shape):
    """Shape of a DLite drafter; the names are those of its checkpoint.

    Attributes:
        num_target_layers: L, the target's layer count.
        target_layer_ids: The S target layers whose pivot rows are the context.
        block_size: K + 1, the anchor and the tokens drafted at once.
        anchor_group_size: G, 1 for the anchor alone, 2 for its predecessor too.
        sequential_rank: r, width of the recurrent head.
        mask_token_id: Row of the target's embedding that stands for "draft here".
        version: One of `VERSIONS`; what follows needs "dlite_agent_v1".
        draft_vocab_size: V_d, how many tokens the head can write; 0 in "dlite_v1", where it can write all.
        has_confidence: Whether a confidence head says how likely each token is to be accepted.
        has_mask_embedding: Whether "draft here" is a learned vector instead of a row of the target's embedding.
    """

    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    anchor_group_size: int
    sequential_rank: int
    mask_token_id: int
    version: str = V1
    draft_vocab_size: int = 0
    has_confidence: bool = False
    has_mask_embedding: bool = False

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        if self.sequential_rank < 1:
            raise ConfigError(f"sequential_rank is {self.sequential_rank}; expected at least 1")
        if self.anchor_group_size not in (1, 2):
            raise ConfigError(f"anchor_group_size is {self.anchor_group_size}; expected 1 or 2")
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}; expected at least 2 (the anchor and one draft)")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id is {self.mask_token_id}; expected 0..{self.vocab_size - 1}")
        self._check_version()

    def _check_version(self) -> None:
        if self.version not in VERSIONS:
            raise ConfigError(f"version is {self.version!r}; expected one of {', '.join(VERSIONS)}")
        least, most = (1, self.vocab_size) if self.version == AGENT_V1 else (0, 0)
        if not least <= self.draft_vocab_size <= most:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected {least}..{most} in version {self.version}"
            )
        if self.version == V1 and (self.has_confidence or self.has_mask_embedding):
            raise ConfigError(f"a confidence head or a learned mask in version {V1}; expected {AGENT_V1}")

    @property
    def num_drafts(self) -> int:
        """K, the most tokens one draft can have."""
        return self.block_size - 1


class _Layer(Layer):
    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        rope: Rope,
        block_rope: Rope,
        mask: torch.Tensor | None = None,
        *,
        num_out: int,
    ) -> torch.Tensor:
        """Let `block [B, T, d]` look at `context [B, S, d]` and at itself; `rope` is of all slots.

        Returns the last `num_out` rows of the block.
        """
        normed = self.input_layernorm(block)
        key, value = self.self_attn.keys_values(torch.cat([context, normed], dim=1), rope)
        block, normed, (cos, sin) = block[:, -num_out:], normed[:, -num_out:], block_rope
        mask = None if mask is None else mask[..., -num_out:, :]
        block = block + self.self_attn(normed, (cos[-num_out:], sin[-num_out:]), key, value, mask)
        out: torch.Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return out


class SequentialHead(nn.Module):
    """A gated recurrence of rank r over the block's tokens, fused with the block's hidden states."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        rank, width = config.sequential_rank, config.hidden_size
        self.rank = rank
        if config.version == AGENT_V1:
            self.prev_token_proj = nn.Linear(width, rank, bias=False)
        else:
            self.prev_token_embedding = nn.Embedding(config.vocab_size, rank)
        self.state_proj = nn.Linear(2 * rank, 2 * rank)
        self.state_hidden_mlp = nn.Linear(rank + width, rank)
        self.output_proj = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.has_confidence:
            self.confidence_proj = nn.Linear(rank + width, 1)

    def start(self, batch: int) -> torch.Tensor:
        """Return the zero state `[batch, r]`."""
        return self.state_proj.bias.new_zeros(batch, self.rank)

    def previous(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return what stands for previous `tokens [...]`, `[..., r]`; `embedding [vocab, d]` is the target's."""
        if hasattr(self, "prev_token_proj"):
            rows = functional.embedding(tokens, embedding).to(self.state_proj.bias.dtype)
            projected: torch.Tensor = self.prev_token_proj(rows)
            return projected
        looked_up: torch.Tensor = self.prev_token_embedding(tokens)
        return looked_up

    def advance(self, state: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Take a token's `previous [B, r]` into `state [B, r]`."""
        gate, candidate = self.state_proj(torch.cat([state, previous], dim=-1)).chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate)

    def logits(self, state: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[..., V_d]` from `state [..., r]` and `hidden [..., d]`."""
        out: torch.Tensor = self.output_proj(self.state_hidden_mlp(torch.cat([state, hidden], dim=-1)))
        return out

    def confidence_logits(self, state: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[...]`, whose sigmoid says how likely the token is to be accepted if those before it are."""
        out: torch.Tensor = self.confidence_proj(torch.cat([hidden, state], dim=-1)).squeeze(-1)
        return out


@dataclass(frozen=True, slots=True)
class Roll:
    """A draft of n tokens for each of B texts.

    Attributes:
        tokens: `[B, n]`, ids of the target's vocabulary.
        logits: `[B, n, V_d]`, over the head's vocabulary.
        states: `[B, n, r]`, the head's, with all previous tokens taken in.
        hidden: `[B, n, d]`, the block's.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    states: torch.Tensor
    hidden: torch.Tensor


Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""Chooses the k-th tokens `[B]`, ids of the target's vocabulary, from logits `[B, V_d]`."""


class DLiteModel(nn.Module):
    """The network: local module and sequential head. Embeddings are the target's and are passed in."""

    draft_to_target: torch.Tensor

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.context_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_depth_embedding = nn.Embedding(config.num_target_layers, config.hidden_size)
        self.sequential_head = SequentialHead(config)
        if config.has_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        if config.version == AGENT_V1:
            ascending = torch.arange(config.draft_vocab_size, dtype=torch.int32)  # as a checkpoint must have them
            self.register_buffer("draft_to_target", ascending)
        self._constants: dict[tuple[torch.dtype, torch.device], _Constants] = {}

    def hidden(self, pivot: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the block's hidden states `[B, K, d]`.

        Args:
            pivot: `[B, S, d]`, target hidden states of the row before the anchor.
            anchors: `[B, G]`, the newest tokens, the anchor last.
            embedding: `[vocab, d]`, the target's.
        """
        constants = self._constants_like(pivot)
        return self.block(self.context(pivot), constants.rope, constants.block_rope, anchors, embedding)

    def context(self, pivot: torch.Tensor) -> torch.Tensor:
        """Return the context slots `[B, S, d]` of a pivot."""
        layer_ids = self._constants_like(pivot).layer_ids
        out: torch.Tensor = self.context_norm(pivot + self.layer_depth_embedding(layer_ids))
        return out

    def block(
        self,
        context: torch.Tensor,
        rope: Rope,
        block_rope: Rope,
        anchors: torch.Tensor,
        embedding: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the block's hidden states `[B, K, d]` over any context slots.

        Args:
            context: `[B, slots, d]`.
            rope: Of the context's slots and the block's.
            block_rope: Of the block's.
            anchors: `[B, G]`.
            embedding: `[vocab, d]`.
            mask: True where the block may look, or None for everywhere.
        """
        config = self.config
        query: torch.Tensor = self.mask_embedding if config.has_mask_embedding else embedding[config.mask_token_id]
        queries = query.to(context.dtype).expand(anchors.shape[0], config.num_drafts, config.hidden_size)
        block = torch.cat([functional.embedding(anchors, embedding).to(context.dtype), queries], dim=1)
        *before, last = self.layers
        for layer in before:
            block = layer(block, context, rope, block_rope, mask, num_out=block.shape[1])
        block = last(block, context, rope, block_rope, mask, num_out=config.num_drafts)  # only drafts are read there
        out: torch.Tensor = self.norm(block)
        return out

    def start(self, anchors: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the head's state before the anchor: zero, or one update on the anchor's predecessor."""
        head = self.sequential_head
        state = head.start(anchors.shape[0])
        return head.advance(state, head.previous(anchors[:, 0], embedding)) if anchors.shape[1] == 2 else state

    def greedy(
        self, pivot: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor, *, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft greedily; returns tokens `[B, n]` and logits `[B, n, V_d]` with n at most K."""
        roll = self.roll(pivot, anchors, embedding, num_tokens=num_tokens, choose=self.likeliest)
        return roll.tokens, roll.logits

    def likeliest(self, k: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens `[B]` of `logits [B, V_d]`, ids of the target's vocabulary."""
        return likeliest(logits, self.written_ids)

    @property
    def written_ids(self) -> torch.Tensor | None:
        """The ids that the head can write, `[V_d]`; None for all."""
        return self.draft_to_target if self.config.version == AGENT_V1 else None

    def to_draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the places of tokens in the head's vocabulary; of one that it does not have, any place."""
        return tokens if self.written_ids is None else draft_places(tokens, self.written_ids)[0]

    def states(self, anchors: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the head's states `[B, n, r]` when `tokens [B, n]` are drafted (the last is not looked at)."""
        head = self.sequential_head
        taken_in = torch.cat([anchors[:, -1:], tokens[:, :-1]], dim=1)
        previous = head.previous(taken_in, embedding)
        state, states = self.start(anchors, embedding), []
        for k in range(tokens.shape[1]):
            state = head.advance(state, previous[:, k])
            states.append(state)
        return torch.stack(states, dim=1)

    def forced(
        self, hidden: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits `[B, n, V_d]` when `tokens [B, n]` are what was drafted."""
        return self.sequential_head.logits(self.states(anchors, tokens, embedding), hidden[:, : tokens.shape[1]])

    def roll(
        self,
        pivot: torch.Tensor,
        anchors: torch.Tensor,
        embedding: torch.Tensor,
        *,
        num_tokens: int,
        choose: Choose,
    ) -> Roll:
        """Draft at most K tokens, each chosen from its logits."""
        head, hidden = self.sequential_head, self.hidden(pivot, anchors, embedding)
        state, token = self.start(anchors, embedding), anchors[:, -1]
        tokens, logits, states = [], [], []
        for k in range(min(num_tokens, self.config.num_drafts)):
            state = head.advance(state, head.previous(token, embedding))
            states.append(state)
            logits.append(head.logits(state, hidden[:, k]))
            token = choose(k, logits[-1])
            tokens.append(token)
        return Roll(
            torch.stack(tokens, dim=1), torch.stack(logits, dim=1), torch.stack(states, dim=1), hidden[:, : len(tokens)]
        )

    def _constants_like(self, like: torch.Tensor) -> _Constants:
        """Return the tables for inputs of this type and place, made the first time."""
        key = (like.dtype, like.device)
        if key not in self._constants:
            with torch.inference_mode(False):  # they serve training as well
                self._constants[key] = _Constants.of(self.config, dtype=like.dtype, device=like.device)
        return self._constants[key]


@dataclass(frozen=True, slots=True)
class _Constants:
    """What every draft needs and none changes.

    Attributes:
        layer_ids: `[S]`.
        rope: Of all S + G + K slots: those of the context stand at position 0, block slot i at position i.
        block_rope: Of the block's slots.
    """

    layer_ids: torch.Tensor
    rope: Rope
    block_rope: Rope

    @classmethod
    def of(cls, config: DLiteConfig, *, dtype: torch.dtype, device: torch.device) -> _Constants:
        block = torch.arange(config.anchor_group_size + config.num_drafts, device=device)
        context = block.new_zeros(len(config.target_layer_ids))

        def tables(positions: torch.Tensor) -> Rope:
            return rope_tables(positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=dtype)

        layer_ids = torch.tensor(config.target_layer_ids, device=device)
        return cls(layer_ids, tables(torch.cat([context, block])), tables(block))


class DLiteDrafter:
    """Drafts from the pivot. Between two proposals it holds weights and nothing else."""

    name = "dlite"

    def __init__(self, model: DLiteModel, embedding: torch.Tensor) -> None:
        """Pair a model with its target's `embedding [vocab, d]`."""
        self.model = model.eval().requires_grad_(False)
        self.embedding = embedding

    @torch.inference_mode()
    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Draft behind the anchors and what is drafted already; nothing where that fills the block or no pivot is."""
        able = [i for i, view in enumerate(views) if self.is_able(view)]
        proposals = [Proposal((), self.name) for _ in views]
        if able:
            drafting = [views[i] for i in able]
            draws = Draws(drafting, self.model.written_ids, vocab_size=self.embedding.shape[0])
            for i, proposal in zip(able, self.draft(drafting, draws), strict=True):
                proposals[i] = proposal
        return proposals

    def is_able(self, view: DraftView) -> bool:
        """Whether anything can be drafted there: with a pivot, and room in the block."""
        config = self.model.config
        has_room = view.max_tokens > 0 and len(view.drafted) < config.num_drafts
        return has_room and view.pivot is not None and len(view.ids) >= config.anchor_group_size

    @torch.inference_mode()
    def draft(self, views: Sequence[DraftView], draws: Draws) -> list[Proposal]:
        """Draft for views that can be drafted for; `draws` chooses the tokens."""
        group = self.model.config.anchor_group_size
        pivot = torch.stack([view.pivot for view in views if view.pivot is not None])
        anchors = torch.tensor([view.ids[-group:].tolist() for view in views], device=pivot.device)
        roll = self.model.roll(
            pivot.to(self.model.norm.weight.dtype),
            anchors,
            self.embedding,
            num_tokens=max(len(view.drafted) + view.max_tokens for view in views),
            choose=draws.choose,
        )
        rows = zip(views, roll.tokens.tolist(), self._confidence(roll).tolist(), draws.distributions, strict=True)
        return [self._proposal(view, tokens, sure, q) for view, tokens, sure, q in rows]

    def _confidence(self, roll: Roll) -> torch.Tensor:
        """Return how likely each token is to be accepted, `[B, n]`; forced ones may get anything."""
        if self.model.config.has_confidence:
            return torch.sigmoid(self.model.sequential_head.confidence_logits(roll.states, roll.hidden).float())
        chosen = self.model.to_draft(roll.tokens).unsqueeze(-1)
        return torch.softmax(roll.logits.float(), dim=-1).gather(-1, chosen).squeeze(-1)

    def _proposal(
        self, view: DraftView, tokens: list[int], sure: list[float], distributions: list[torch.Tensor]
    ) -> Proposal:
        start = len(view.drafted)
        stop = start + view.max_tokens
        return Proposal(tokens[start:stop], self.name, sure[start:stop], distributions[: view.max_tokens])
