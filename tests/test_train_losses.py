"""The losses are their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from dlite_agent.train.anchors import Batch
from dlite_agent.train.config import TrainConfig
from dlite_agent.train.losses import losses, position_weights, total_variation

VOCABULARY = torch.tensor([1, 4, 5, 9], dtype=torch.int32)


def batch(labels: list[int], *, tokens: list[int] | None = None, there: int | None = None) -> Batch:
    """One anchor; the target gives its label 0.6, token 5 (or 4, if that is the label) 0.3, token 7 the rest."""
    count = len(labels)
    second = [4 if label == 5 else 5 for label in labels]
    top_ids = torch.tensor([[[a, b, 7] for a, b in zip(labels, second, strict=True)]])
    return Batch(
        pivot=torch.zeros(1, 2, 4),
        anchors=torch.zeros(1, 2, dtype=torch.long),
        tokens=torch.tensor([labels if tokens is None else tokens]),
        labels=torch.tensor([labels]),
        top_ids=top_ids,
        top_logprobs=torch.tensor([0.6, 0.3, 0.1]).log().expand(1, count, 3),
        is_there=torch.tensor([[k < (count if there is None else there) for k in range(count)]]),
    )


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_total_variation_counts_what_the_head_cannot_write_as_one_event() -> None:
    q = [0.2, 0.5, 0.2, 0.1]  # of tokens 1, 4, 5, 9
    distance = total_variation(logits_of(q, q), batch([4, 7]), VOCABULARY)
    # label 4: |.6 - .5| + |.3 - .2| + |the rest: .1 - .3|; label 7 is not in the vocabulary: |.3 - .2| + |.7 - .8|
    assert distance[0].tolist() == pytest.approx([0.5 * 0.4, 0.5 * 0.2], abs=1e-6)


def test_it_is_zero_for_the_targets_own_distribution_and_one_for_the_opposite() -> None:
    same = total_variation(logits_of([0.05, 0.6, 0.3, 0.05]), batch([4]), VOCABULARY)
    assert float(same) == pytest.approx(0.0, abs=1e-6)
    target = Batch(*(getattr(batch([4]), name) for name in Batch.__slots__))
    sure = Batch(
        **{name: getattr(target, name) for name in Batch.__slots__ if name != "top_logprobs"},
        top_logprobs=torch.tensor([[[0.0, -50.0, -50.0]]]),
    )
    assert float(total_variation(logits_of([1e-9, 1e-9, 1.0, 1e-9]), sure, VOCABULARY)) == pytest.approx(1.0, abs=1e-5)


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    config = TrainConfig(position_decay=2.0, w_ce=0.5, w_tv=3.0, w_confidence=0.25)
    q = logits_of([0.2, 0.5, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1], [0.25, 0.25, 0.25, 0.25])
    sample = batch([4, 7, 5], there=2)  # the label of the second cannot be written, the third is not there
    confidence = torch.tensor([[2.0, -1.0, 5.0]])
    result = losses(q, confidence, sample, draft_to_target=VOCABULARY, config=config)
    weights = [1.0, math.exp(-1 / 2)]
    distances = total_variation(q, sample, VOCABULARY)[0].tolist()
    tv = sum(w * d for w, d in zip(weights, distances, strict=False)) / sum(weights)
    surprises = [-math.log(1 / (1 + math.exp(-2.0))), -math.log(1 - 1 / (1 + math.exp(1.0)))]  # right, wrong
    sure = sum(w * s for w, s in zip(weights, surprises, strict=True)) / sum(weights)
    assert float(result.ce) == pytest.approx(-math.log(0.5), rel=1e-5)
    assert float(result.tv) == pytest.approx(tv, rel=1e-5)
    assert float(result.confidence) == pytest.approx(sure, rel=1e-5)
    assert float(result.total) == pytest.approx(-0.5 * math.log(0.5) + 3 * tv + 0.25 * sure, rel=1e-5)
    assert result.num_right.tolist() == [1, 0, 0]
    assert result.num_there.tolist() == [1, 1, 0]


def test_positions_behind_a_token_that_was_not_the_likeliest_can_count_less() -> None:
    sample = batch([1, 4, 5, 9], tokens=[1, 5, 5, 9])
    weights = position_weights(sample, TrainConfig(position_decay=1e9, off_path_weight=0.25))
    assert weights[0].tolist() == pytest.approx([1.0, 1.0, 0.25, 0.25])
    assert position_weights(sample, TrainConfig(position_decay=1e9))[0].tolist() == pytest.approx([1.0] * 4)


def test_the_confidence_head_moves_nothing_else() -> None:
    q = logits_of([0.2, 0.5, 0.2, 0.1]).requires_grad_()
    confidence = torch.zeros(1, 1, requires_grad=True)
    config = TrainConfig(w_ce=0.0, w_tv=0.0, w_confidence=1.0)
    losses(q, confidence, batch([4]), draft_to_target=VOCABULARY, config=config).total.backward()  # type: ignore[no-untyped-call]
    assert confidence.grad is not None and confidence.grad.abs().sum() > 0
    assert q.grad is None or q.grad.abs().sum() == 0
