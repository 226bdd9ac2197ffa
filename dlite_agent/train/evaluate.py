"""Held-out tau: how far drafts would have reached in answers that no training step has seen.

The target is not needed. Its greedy answers are known, so whether it would accept a draft is known too: drafts are made
behind every place of an answer at once, and then decoding is replayed, each step beginning where the one before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dlite_agent.train.anchors import AnchorTable
from dlite_agent.train.contexts import ContextReader
from dlite_agent.train.shards import read_shard
from dlite_agent.train.students import Student


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What drafts reached in held-out greedy answers.

    Attributes:
        tau: Tokens per target pass: accepted drafts and the bonus token; the pass that ends in a draft's end token has
            no bonus.
        accepted_at: `[K]`, share of the drafts at each position that were accepted, of the steps that got there.
        num_steps: Target passes replayed.
    """

    tau: float
    accepted_at: tuple[float, ...]
    num_steps: int


@torch.no_grad()
def held_out_tau(
    student: Student,
    paths: Sequence[Path],
    *,
    device: torch.device | None = None,
    reader: ContextReader | None = None,
    max_answers: int | None = None,
) -> HeldOut:
    """Replay the greedy answers of some shards.

    Args:
        student: Drafts, greedily.
        paths: Shards of a held-out corpus.
        device: Where the student is; by default the CPU.
        reader: Where the prompts are, if it reads them.
        max_answers: The first so many answers only.
    """
    tally = _Tally(student.num_drafts)
    was_training = student.model.training
    student.model.eval()
    for path in paths:
        if max_answers is not None and tally.num_answers >= max_answers:
            break
        shard = read_shard(path)
        table = AnchorTable([shard])
        limit = len(shard) if max_answers is None else max_answers - tally.num_answers
        greedy = [index for index in range(len(shard)) if shard.facts["sample"][index] == 0][:limit]
        for index in greedy:
            if len(shard.answer(index).tokens) > 1:
                batch = table.gather_answers(
                    [index], num_drafts=student.num_drafts, reader=reader, look_back=student.look_back
                ).to(device or torch.device("cpu"))
                tally.walk(((student.greedy(batch) == batch.tokens) & batch.is_there).tolist())
    student.model.train(was_training)
    return tally.sum_up()


class _Tally:
    def __init__(self, num_drafts: int) -> None:
        self.num_answers = 0
        self.num_steps = 0
        self.num_tokens = 0
        self.reached = [0] * num_drafts
        self.accepted = [0] * num_drafts

    def walk(self, matches: list[list[bool]]) -> None:
        """Replay one answer; `matches[j][k]` says whether draft k behind place j is the token that was written."""
        self.num_answers += 1
        place, last = 0, len(matches)
        while place < last:
            room = last - place  # tokens there are behind this place
            row = matches[place][:room]
            accepted = next((k for k, is_match in enumerate(row) if not is_match), len(row))
            for k in range(min(accepted + 1, len(row))):
                self.reached[k] += 1
                self.accepted[k] += k < accepted
            step = min(accepted + 1, room)
            self.num_tokens += step
            self.num_steps += 1
            place += step

    def sum_up(self) -> HeldOut:
        rates = tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))
        return HeldOut(self.num_tokens / self.num_steps if self.num_steps else 0.0, rates, self.num_steps)
