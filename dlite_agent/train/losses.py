"""What a drafter is punished for; pure functions of its outputs and of what the target said.

Cross-entropy makes the target's likeliest token the drafter's, which is what greedy verification accepts; total
variation is the share of drafts that sampling rejects. The target's distribution is known by its 16 likeliest tokens;
all others count as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from dlite_agent.drafters.draws import draft_places
from dlite_agent.train.anchors import Batch
from dlite_agent.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Losses:
    """One batch's losses, and what share of the drafts is right.

    Attributes:
        total: What to descend on.
        ce: Cross-entropy, weighted mean over positions whose label the head can write.
        tv: Total variation distance, weighted mean.
        confidence: Cross-entropy of the confidence head; 0 without one.
        num_right: `[K]`, drafts equal to the label, at each position.
        num_there: `[K]`, positions there are.
    """

    total: torch.Tensor
    ce: torch.Tensor
    tv: torch.Tensor
    confidence: torch.Tensor
    num_right: torch.Tensor
    num_there: torch.Tensor


def position_weights(batch: Batch, config: TrainConfig) -> torch.Tensor:
    """Return `[B, K]`: how much each position counts; 0 behind the answer's end."""
    steps = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    weights = torch.exp(-steps / config.position_decay) * batch.is_there
    if config.off_path_weight != 1.0:
        strayed = (batch.tokens != batch.labels).cumsum(dim=1) - (batch.tokens != batch.labels).long() > 0
        weights = torch.where(strayed, weights * config.off_path_weight, weights)
    return weights


def total_variation(logits: torch.Tensor, batch: Batch, draft_to_target: torch.Tensor) -> torch.Tensor:
    """Return the distance `[B, K]` between softmax(`logits [B, K, V_d]`) and the target's distribution, 0 to 1.

    The target's other tokens, and those that the head cannot write, are one event.
    """
    places, is_known = draft_places(batch.top_ids, draft_to_target)
    p = batch.top_logprobs.exp() * is_known
    q = torch.softmax(logits.float(), dim=-1).gather(-1, places) * is_known
    rest = (p.sum(dim=-1) - q.sum(dim=-1)).abs()
    return 0.5 * ((p - q).abs().sum(dim=-1) + rest)


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean under weights; 0 where all are 0."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-9)


def losses(
    logits: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    batch: Batch,
    *,
    draft_to_target: torch.Tensor,
    config: TrainConfig,
) -> Losses:
    """Compare a teacher-forced draft with the target.

    Args:
        logits: `[B, K, V_d]`.
        confidence_logits: `[B, K]`, or None without a confidence head.
        batch: The anchors drafted behind.
        draft_to_target: `[V_d]`, the head's vocabulary.
        config: Weights.
    """
    logits = logits.float()  # once: it is large
    weights = position_weights(batch, config)
    places, is_known = draft_places(batch.labels, draft_to_target)
    likelihood = functional.cross_entropy(logits.flatten(0, 1), places.flatten(), reduction="none")
    ce = weighted_mean(likelihood.view_as(weights), weights * is_known)
    tv = weighted_mean(total_variation(logits, batch, draft_to_target), weights)
    is_right = (logits.argmax(dim=-1) == places) & is_known
    confidence = ce.new_zeros(())
    if confidence_logits is not None:
        surprise = functional.binary_cross_entropy_with_logits(
            confidence_logits.float(), is_right.float(), reduction="none"
        )
        confidence = weighted_mean(surprise, weights)
    total = config.w_ce * ce + config.w_tv * tv + config.w_confidence * confidence
    num_right = (is_right & batch.is_there).sum(dim=0)
    return Losses(total, ce.detach(), tv.detach(), confidence.detach(), num_right, batch.is_there.sum(dim=0))
