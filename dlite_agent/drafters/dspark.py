"""The DSpark baseline: a block drafter that keeps keys and values of every token of the context.

After DSpark (arXiv 2607.05147) and its backbone DFlash (arXiv 2602.06036), written from their formulas. The hidden
states of S target layers at *every* row are fused into one vector; each draft layer projects keys and values from it
and keeps them. The anchor and K masks look at all of them and at each other. Logits are those of the target's own
output rows plus a low-rank Markov term of the token before: logits_k = U_k + W_2 W_1 e(x_{k-1}).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.drafters.draws import Draws
from dlite_agent.drafters.history import (
    Before,
    HistoryConfig,
    HistoryModel,
    KeyValues,
    Rows,
    head_logits,
    rows_as_linear,
)
from dlite_agent.drafters.layers import RMSNorm
from dlite_agent.drafters.protocol import DraftView, Proposal, TextKey

_MAX_PENDING = 512


class DSparkModel(HistoryModel):
    """The network. Embedding and output rows are the target's and are passed in."""

    def __init__(self, config: HistoryConfig) -> None:
        super().__init__(config)
        width, rank = config.hidden_size, config.rank
        self.fuse = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.context_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        self.prev_token_proj = nn.Linear(width, rank, bias=False)
        self.markov_proj = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.confidence_proj = nn.Linear(width + rank, 1)

    def read(self, features: torch.Tensor, *, start: int) -> list[Rows]:
        """Return each layer's keys and values of context rows.

        Args:
            features: `[n, S, d]`.
            start: Position of the first.
        """
        fused = self.context_norm(self.fuse(features.flatten(1))).unsqueeze(0)
        return self.keys_values(fused, torch.arange(start, start + features.shape[0], device=features.device))

    def hidden(
        self, anchors: torch.Tensor, positions: torch.Tensor, before: Before, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Return `[m, K, d]` behind anchors of one text, tokens `[m]` at absolute `positions [m]`."""
        num_drafts = self.config.num_drafts
        masks = self.mask_embedding.expand(len(anchors), num_drafts, -1)
        tokens = functional.embedding(anchors, embedding).to(masks.dtype).unsqueeze(1)
        every = positions.unsqueeze(1) + torch.arange(num_drafts + 1, device=positions.device)
        hidden, _ = self.blocks(torch.cat([tokens, masks], dim=1), every, before, is_causal=False)
        return hidden[:, 1:]

    def previous(self, tokens: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return what stands for previous `tokens [...]`, `[..., r]`."""
        out: torch.Tensor = self.prev_token_proj(functional.embedding(tokens, embedding).to(self.norm.weight.dtype))
        return out

    def logits(self, hidden: torch.Tensor, previous: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Return `[..., V_d]` from `hidden [..., d]`, `previous [..., r]` and `head [V_d, d]`."""
        out: torch.Tensor = head_logits(hidden, head) + self.markov_proj(previous)
        return out

    def confidence_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return `[...]`, whose sigmoid says how likely a token is to be accepted if those before it are."""
        out: torch.Tensor = self.confidence_proj(torch.cat([hidden, previous], dim=-1)).squeeze(-1)
        return out


class _History:
    """One text: rows that were read, and features of rows that were not yet."""

    def __init__(self, num_layers: int) -> None:
        self.cache = KeyValues(num_layers)
        self.pending: list[torch.Tensor] = []

    @property
    def length(self) -> int:
        return self.cache.length + sum(len(rows) for rows in self.pending)

    def crop(self, length: int) -> None:
        if length <= self.cache.length:
            self.pending = []
            self.cache.crop(length)
        elif length < self.length:
            self.pending = [torch.cat(self.pending)[: length - self.cache.length]]


class DSparkDrafter:
    """Drafts from its own keys and values of the whole context."""

    name = "dspark"

    def __init__(self, model: DSparkModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Pair a model with its target's `embedding [vocab, d]` and output rows `head [vocab, d]`."""
        self.model = model.eval().requires_grad_(False)
        self.embedding = embedding
        self.head = rows_as_linear(head[model.draft_to_target.long()])
        self._histories: weakref.WeakKeyDictionary[TextKey, _History] = weakref.WeakKeyDictionary()

    def state_bytes(self) -> int:
        """Return the bytes kept for all texts."""
        histories = list(self._histories.values())
        return sum(h.cache.nbytes + sum(rows.nbytes for rows in h.pending) for h in histories)

    def num_read(self, text: TextKey) -> int:
        """Return how many rows of a text are known."""
        history = self._histories.get(text)
        return 0 if history is None else history.length

    @torch.inference_mode()
    def read(self, text: TextKey, start: int, features: torch.Tensor) -> None:
        """Take features `[rows, S, d]`; many are turned into keys and values at once, few when they are needed.

        Raises:
            ValueError: If the rows before them were never read.
        """
        history = self._histories.setdefault(text, _History(self.model.config.num_hidden_layers))
        if start > history.length:
            raise ValueError(f"rows from {start} on, but only {history.length} were read before")
        history.crop(start)
        history.pending.append(features.to(self.model.norm.weight.dtype))
        if history.length - history.cache.length >= _MAX_PENDING:
            self._catch_up(history)

    def _catch_up(self, history: _History) -> None:
        if not history.pending:
            return
        features, history.pending = torch.cat(history.pending), []
        for index, rows in enumerate(self.model.read(features, start=history.cache.length)):
            history.cache.join(index, rows)
        history.cache.keep(len(features))

    @torch.inference_mode()
    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Draft behind each anchor; nothing where not all rows before it were read."""
        return [self._propose(view) for view in views]

    def _propose(self, view: DraftView) -> Proposal:
        history, num_rows, config = self._histories.get(view.text), len(view.ids) - 1, self.model.config
        num_tokens = min(config.num_drafts, len(view.drafted) + view.max_tokens)
        if history is None or history.length < num_rows or num_rows < 1 or num_tokens <= len(view.drafted):
            return Proposal((), self.name)
        history.crop(num_rows)
        self._catch_up(history)
        device = self.embedding.device
        anchor, position = torch.tensor([int(view.ids[-1])], device=device), torch.tensor([num_rows], device=device)
        hidden = self.model.hidden(anchor, position, history.cache, self.embedding)[0]
        draws = Draws([view], self.model.draft_to_target, vocab_size=len(self.embedding))
        tokens = [anchor]
        sure = []
        base = self.head(hidden[:num_tokens])
        for k in range(num_tokens):
            previous = self.model.previous(tokens[-1], self.embedding)
            tokens.append(draws.choose(k, base[k : k + 1] + self.model.markov_proj(previous)))
            sure.append(self.model.confidence_logits(hidden[k : k + 1], previous))
        ids = torch.cat(tokens[1:]).tolist()
        confidence = torch.sigmoid(torch.cat(sure).float()).tolist()
        begin = len(view.drafted)
        return Proposal(ids[begin:], self.name, confidence[begin:], draws.distributions[0])
