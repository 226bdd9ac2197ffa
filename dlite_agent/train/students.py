"""What the trainer knows of a drafter: hidden states, logits behind given tokens, drafts, and how to write it down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from dlite_agent.drafters import baselines, checkpoint
from dlite_agent.drafters.dlite import DLiteModel
from dlite_agent.drafters.draws import likeliest
from dlite_agent.drafters.dspark import DSparkModel
from dlite_agent.drafters.history import FixedRows, HistoryModel, head_logits
from dlite_agent.drafters.independent import IndependentModel
from dlite_agent.errors import ConfigError
from dlite_agent.train.anchors import Batch
from dlite_agent.train.teacher import Teacher, window_rows

_INIT_STD = 0.02


class Student(Protocol):
    """A drafter in training; B anchors at a time, K drafts behind each."""

    @property
    def num_drafts(self) -> int:
        """Tokens that it drafts at most."""
        ...

    @property
    def num_taught(self) -> int:
        """K, the drafts behind an anchor that it is taught; 1 if all it learns is what comes next."""
        ...

    @property
    def reads_texts(self) -> bool:
        """Whether batches must have the texts."""
        ...

    @property
    def look_back(self) -> int | None:
        """Rows before the first pivot whose features it reads there; None for all."""
        ...

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    @property
    def draft_to_target(self) -> torch.Tensor:
        """The ids that it can write, `[V_d]` int32, ascending."""
        ...

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return `[B, K, d]`."""
        ...

    def logits(
        self, hidden: torch.Tensor, batch: Batch, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits `[B, K, V_d]`, and of the confidence `[B, K]`, when `drafted [B, K]` is what is drafted.

        The last of the drafted tokens is not looked at; the confidence teaches nothing but its own head.
        """
        ...

    def greedy(self, batch: Batch) -> torch.Tensor:
        """Return greedy drafts `[B, num_drafts]`."""
        ...

    def write(self, folder: Path, *, target_names: Sequence[str]) -> None:
        """Write the drafter as a checkpoint, bf16."""
        ...


def _behind(batch: Batch, drafted: torch.Tensor) -> torch.Tensor:
    """Return the token before each draft, `[B, K]`."""
    return torch.cat([batch.anchors[:, -1:], drafted[:, :-1]], dim=1)


def start_afresh(
    model: DLiteModel | HistoryModel | Teacher, *, draft_to_target: torch.Tensor, mask: torch.Tensor, seed: int
) -> None:
    """Give a model fresh weights.

    Args:
        model: Changed in place.
        draft_to_target: `[V_d]` int32, ascending.
        mask: `[d]`, what a learned mask begins as.
        seed: Names the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_INIT_STD, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("mask_embedding"):
                tensor.copy_(mask)
            if name.endswith("draft_to_target"):
                tensor.copy_(draft_to_target)


def temper(model: HistoryModel, head: torch.Tensor) -> None:
    """Scale a baseline's last norm so that its first logits, over the output rows `head`, spread by about 1."""
    with torch.no_grad():
        model.norm.weight.fill_(head[model.draft_to_target.long()].square().sum(dim=1).mean().rsqrt())


def head_of_target(net: DLiteModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
    """Let a sequential head begin as the best one of its rank that says what the target's own head says.

    Output and fusing weights are the leading singular vectors of the target's rows for the tokens that are drafted; a
    previous token is seen along the leading directions of the embedding.

    Args:
        net: Changed in place; its vocabulary must be there.
        embedding: `[vocab, d]`, the target's.
        head: `[vocab, d]`, its output rows.
    """
    own, rank = net.sequential_head, net.config.sequential_rank
    if rank > net.config.hidden_size:
        raise ConfigError(f"rank is {rank}; a head from the target's can have {net.config.hidden_size} at most")
    left, values, right = torch.linalg.svd(head[net.draft_to_target.long()].double(), full_matrices=False)
    root = values[:rank].sqrt()
    _, spread, directions = torch.linalg.svd(embedding.double(), full_matrices=False)
    scale = len(embedding) ** 0.5 / spread[:rank]
    with torch.no_grad():
        own.output_proj.weight.copy_(left[:, :rank] * root)
        own.state_hidden_mlp.weight[:, rank:].copy_(right[:rank] * root.unsqueeze(1))
        own.prev_token_proj.weight.copy_(directions[:rank] * scale.unsqueeze(1))


class DLiteStudent:
    """DLite: the pivot is all it sees."""

    reads_texts = False
    look_back = 0

    def __init__(self, model: DLiteModel, embedding: torch.Tensor) -> None:
        """Teach a model that drafts with a target's `embedding [vocab, d]`."""
        self.model = model
        self.embedding = embedding
        self.num_drafts = self.num_taught = model.config.num_drafts

    @property
    def draft_to_target(self) -> torch.Tensor:
        """The ids that it can write."""
        return self.model.draft_to_target

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the block's hidden states."""
        return self.model.hidden(batch.pivot, self.anchors(batch), self.embedding)

    def logits(
        self, hidden: torch.Tensor, batch: Batch, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the sequential head over given tokens."""
        head = self.model.sequential_head
        states = self.model.states(self.anchors(batch), drafted, self.embedding)
        confidence = None
        if self.model.config.has_confidence:
            confidence = head.confidence_logits(states.detach(), hidden.detach())
        return head.logits(states, hidden), confidence

    def greedy(self, batch: Batch) -> torch.Tensor:
        """Draft as decoding does."""
        anchors = self.anchors(batch)
        return self.model.greedy(batch.pivot, anchors, self.embedding, num_tokens=self.num_drafts)[0]

    def write(self, folder: Path, *, target_names: Sequence[str]) -> None:
        """Write a `dlite_agent_v1` checkpoint."""
        checkpoint.save(self.model, folder, dtype=torch.bfloat16, target_names=target_names)

    def anchors(self, batch: Batch) -> torch.Tensor:
        """Return the anchors that it reads, `[B, G]`."""
        return batch.anchors[:, -self.model.config.anchor_group_size :]


class TeacherStudent:
    """The teacher of a DLite drafter: it sees the pivot, and the rows of a window before it."""

    reads_texts = True

    def __init__(self, model: Teacher, embedding: torch.Tensor) -> None:
        """Teach a model that drafts with a target's `embedding [vocab, d]`."""
        self.model = model
        self.embedding = embedding
        self.look_back = model.window
        self._inner = DLiteStudent(model.net, embedding)
        self.num_drafts = self.num_taught = self._inner.num_drafts

    @property
    def draft_to_target(self) -> torch.Tensor:
        """The ids that it can write."""
        return self._inner.draft_to_target

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the block's hidden states."""
        windows, is_there = window_rows(batch, self.model.window)
        return self.model.hidden(batch.pivot, windows, is_there, self._inner.anchors(batch), self.embedding)

    def logits(
        self, hidden: torch.Tensor, batch: Batch, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the sequential head over given tokens."""
        return self._inner.logits(hidden, batch, drafted)

    def greedy(self, batch: Batch) -> torch.Tensor:
        """Draft token by token."""
        hidden, drafts = self.hidden(batch), batch.tokens.new_zeros(len(batch), self.num_drafts)
        for k in range(self.num_drafts):
            logits, _ = self.logits(hidden, batch, drafts)
            drafts[:, k] = likeliest(logits[:, k], self.draft_to_target)
        return drafts

    def write(self, folder: Path, *, target_names: Sequence[str]) -> None:
        """Write the teacher's weights; it is no drafter."""
        self.model.write(folder)


class DSparkStudent:
    """DSpark: it sees the features of all rows before the anchor."""

    reads_texts = True
    look_back = None

    def __init__(self, model: DSparkModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Teach a model that drafts with a target's `embedding [vocab, d]` and output rows `head [vocab, d]`."""
        self.model = model
        self.embedding = embedding
        self.head = head[model.draft_to_target.long()]
        self.num_drafts = self.num_taught = model.config.num_drafts

    @property
    def draft_to_target(self) -> torch.Tensor:
        """The ids that it can write."""
        return self.model.draft_to_target

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the blocks' hidden states, text by text."""
        anchors = torch.split(batch.anchors[:, -1], [len(text.positions) for text in batch.texts])
        each = []
        for text, tokens in zip(batch.texts, anchors, strict=True):
            before = FixedRows(self.model.read(text.features.float(), start=0))
            each.append(self.model.hidden(tokens, text.positions, before, self.embedding))
        return torch.cat(each)

    def logits(
        self, hidden: torch.Tensor, batch: Batch, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the Markov term of given tokens."""
        previous = self.model.previous(_behind(batch, drafted), self.embedding)
        confidence = self.model.confidence_logits(hidden.detach(), previous.detach())
        return self.model.logits(hidden, previous, self.head), confidence

    def greedy(self, batch: Batch) -> torch.Tensor:
        """Draft as decoding does."""
        hidden = self.hidden(batch)
        base, tokens = head_logits(hidden, self.head), [batch.anchors[:, -1]]
        for k in range(self.num_drafts):
            previous = self.model.previous(tokens[-1], self.embedding)
            tokens.append(likeliest(base[:, k] + self.model.markov_proj(previous), self.draft_to_target))
        return torch.stack(tokens[1:], dim=1)

    def write(self, folder: Path, *, target_names: Sequence[str]) -> None:
        """Write a baseline's checkpoint."""
        baselines.save(self.model, folder, dtype=torch.bfloat16, target_names=target_names)


class IndependentStudent:
    """The independent language model: it sees the tokens of the text, and learns what the target says next."""

    reads_texts = True
    look_back = 0
    num_taught = 1

    def __init__(self, model: IndependentModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Teach a model between a target's `embedding [vocab, d]` and output rows `head [vocab, d]`."""
        self.model = model
        self.embedding = embedding
        self.head = head[model.draft_to_target.long()]
        self.num_drafts = model.config.num_drafts

    @property
    def draft_to_target(self) -> torch.Tensor:
        """The ids that it can write."""
        return self.model.draft_to_target

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of the anchors' own rows, `[B, 1, d]`."""
        each = []
        for text in batch.texts:
            ids = text.ids[: int(text.positions.max()) + 1]
            hidden, _ = self.model.read(ids, start=0, before=self._nothing(), embedding=self.embedding)
            each.append(hidden[text.positions])
        return torch.cat(each).unsqueeze(1)

    def logits(
        self, hidden: torch.Tensor, batch: Batch, drafted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the target's output rows; it has no confidence but its own probabilities."""
        return head_logits(hidden, self.head), None

    def greedy(self, batch: Batch) -> torch.Tensor:
        """Draft token by token behind all anchors of a text at once."""
        anchors = torch.split(batch.anchors[:, -1], [len(text.positions) for text in batch.texts])
        each = []
        for text, tokens in zip(batch.texts, anchors, strict=True):
            rows = self.model.read(text.ids, start=0, before=self._nothing(), embedding=self.embedding)[1]
            drafts = tokens.unsqueeze(1)
            for _ in range(self.num_drafts):
                hidden = self.model.behind(drafts, text.positions, FixedRows(rows), self.embedding)
                token = likeliest(head_logits(hidden[:, -1], self.head), self.draft_to_target)
                drafts = torch.cat([drafts, token.unsqueeze(1)], dim=1)
            each.append(drafts[:, 1:])
        return torch.cat(each)

    def write(self, folder: Path, *, target_names: Sequence[str]) -> None:
        """Write a baseline's checkpoint."""
        baselines.save(self.model, folder, dtype=torch.bfloat16, target_names=target_names)

    def _nothing(self) -> FixedRows:
        config = self.model.config
        empty = self.embedding.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        return FixedRows([(empty, empty)] * config.num_hidden_layers)
