"""The independent baseline: a small causal language model of its own, with its own cache of the whole history.

It knows nothing of the target but its vocabulary: embedding and output rows are the target's, the layers between are
trained on the target's answers. It reads every token of every prompt itself, and drafts token by token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from dlite_agent.drafters.draws import Draws, draft_places
from dlite_agent.drafters.history import Before, HistoryConfig, HistoryModel, KeyValues, Rows, rows_as_linear
from dlite_agent.drafters.protocol import DraftView, Proposal, TextKey

_CHUNK = 512


class IndependentModel(HistoryModel):
    """A causal language model between the target's embedding and output rows."""

    def read(
        self, tokens: torch.Tensor, *, start: int, before: Before, embedding: torch.Tensor
    ) -> tuple[torch.Tensor, list[Rows]]:
        """Run `tokens [n]` of one text from a position on; returns hidden states `[n, d]`, and keys and values."""
        slots = functional.embedding(tokens, embedding).to(self.norm.weight.dtype).unsqueeze(0)
        positions = torch.arange(start, start + len(tokens), device=tokens.device).unsqueeze(0)
        hidden, rows = self.blocks(slots, positions, before, is_causal=True)
        return hidden[0], rows

    def behind(
        self, tokens: torch.Tensor, positions: torch.Tensor, before: Before, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Return hidden states `[m, T, d]` of `tokens [m, T]` whose first ones stand at `positions [m]` of one text."""
        slots = functional.embedding(tokens, embedding).to(self.norm.weight.dtype)
        every = positions.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
        return self.blocks(slots, every, before, is_causal=True)[0]


class _History:
    def __init__(self, config: HistoryConfig) -> None:
        self.cache = KeyValues(config.num_hidden_layers)
        self.ids: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)


class IndependentDrafter:
    """Drafts with a language model of its own."""

    name = "independent"

    def __init__(self, model: IndependentModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Pair a model with its target's `embedding [vocab, d]` and output rows `head [vocab, d]`."""
        self.model = model.eval().requires_grad_(False)
        self.embedding = embedding
        self.head = rows_as_linear(head[model.draft_to_target.long()])
        self._histories: weakref.WeakKeyDictionary[TextKey, _History] = weakref.WeakKeyDictionary()

    def state_bytes(self) -> int:
        """Return the bytes kept for all texts."""
        return sum(history.cache.nbytes + history.ids.nbytes for history in list(self._histories.values()))

    @torch.inference_mode()
    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Read what is new in each text, then draft behind it."""
        return [self._propose(view) for view in views]

    def _propose(self, view: DraftView) -> Proposal:
        num_tokens = min(self.model.config.num_drafts - len(view.drafted), view.max_tokens)
        if num_tokens < 1:
            return Proposal((), self.name)
        history = self._histories.setdefault(view.text, _History(self.model.config))
        hidden = self._read(history, np.concatenate([view.ids, np.asarray(view.drafted, dtype=np.int32)]))
        num_read = history.cache.length
        draws = Draws([view], self.model.draft_to_target, vocab_size=len(self.embedding))
        tokens: list[int] = []
        confidence: list[float] = []
        while True:
            logits = self.head(hidden[-1:])
            token = draws.choose(len(view.drafted) + len(tokens), logits)
            place = draft_places(token, self.model.draft_to_target)[0]
            confidence.append(float(torch.softmax(logits.float(), dim=-1)[0, place]))
            tokens.append(int(token))
            if len(tokens) == num_tokens:
                break
            hidden = self._step(history, token)
        history.cache.crop(num_read)
        return Proposal(tokens, self.name, confidence, draws.distributions[0])

    def _read(self, history: _History, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """Bring the cache up to date; returns the hidden states of the last chunk read."""
        shared = min(len(history.ids), len(ids) - 1)
        different = np.flatnonzero(history.ids[:shared] != ids[:shared])
        history.cache.crop(int(different[0]) if len(different) else shared)
        history.ids = ids[: history.cache.length]
        hidden = torch.empty(0)
        for start in range(history.cache.length, len(ids), _CHUNK):
            hidden = self._step(history, torch.from_numpy(ids[start : start + _CHUNK].astype(np.int64)))
            history.ids = ids[: history.cache.length]
        return hidden

    def _step(self, history: _History, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens behind the cache, and keep their rows."""
        tokens = tokens.to(self.embedding.device)
        start = history.cache.length
        hidden, _ = self.model.read(tokens, start=start, before=history.cache, embedding=self.embedding)
        history.cache.keep(len(tokens))
        return hidden
