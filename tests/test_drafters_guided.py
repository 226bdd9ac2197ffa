"""A drafter is told what a grammar lets follow: it drafts what is allowed, and the grammar's own tokens in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dlite_agent.drafters.dlite import DLiteDrafter, DLiteModel
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.lookup import LookupDrafter, chance
from dlite_agent.drafters.protocol import Drafter, DraftView, Guide, Proposal
from dlite_agent.engine.decode import Decoding, decode, run_pass
from dlite_agent.engine.draft_length import FixedLength
from dlite_agent.engine.drafting import Lookahead, draft_draw
from dlite_agent.engine.request import Request
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.testing import random_dlite, tiny_target
from tests.rules import END, RULES, VOCAB, Rule, RuleConstraint, even, free_then_forced

TARGET = tiny_target()
K = 7
PROMPT = list(range(3, 15))
ENDS = frozenset([END])


def two_forced_then_even(path: Sequence[int]) -> Collection[int]:
    return {20 + len(path)} if len(path) < 3 else range(0, VOCAB, 2)


def all_tokens(seed: int = 0) -> DLiteModel:
    return random_dlite(TARGET, num_drafts=K, seed=seed)


def thirds(seed: int = 0) -> DLiteModel:
    """DLite that can write every third token only."""
    written = torch.arange(0, VOCAB, 3, dtype=torch.int32)
    model = random_dlite(TARGET, num_drafts=K, seed=seed, version="dlite_agent_v1", draft_vocab_size=len(written))
    model.draft_to_target.copy_(written)
    return model


def guided(rule: Rule, *, seed: int, forced: Sequence[int] = ()) -> DraftView:
    constraint = RuleConstraint(rule)
    for token in forced:
        constraint.advance(token)
    generator = torch.Generator().manual_seed(seed)
    ids = np.random.default_rng(seed).integers(0, 12, size=30).astype(np.int32)
    pivot = torch.randn(len(TARGET.layer_ids), TARGET.hidden_size, generator=generator)
    return DraftView(ids, tuple(forced), pivot, K - len(forced), guide=Lookahead(constraint, ENDS, K - len(forced)))


def distributions(model: DLiteModel, view: DraftView, tokens: Sequence[int]) -> torch.Tensor:
    """DLite's own distributions `[n, vocab]` when `tokens` are the block's first."""
    assert view.pivot is not None
    anchors = torch.tensor([view.ids[-1:].tolist()])
    with torch.inference_mode():
        hidden = model.hidden(view.pivot.unsqueeze(0), anchors, TARGET.embedding)
        p = model.forced(hidden, anchors, torch.tensor([list(tokens)]), TARGET.embedding)[0].softmax(dim=-1)
        return p if model.written_ids is None else torch.zeros(len(p), VOCAB).index_copy(1, model.written_ids.long(), p)


def held(p: torch.Tensor, allowed: Sequence[int]) -> torch.Tensor:
    """A distribution among the allowed tokens; as it is if that leaves nothing."""
    kept = torch.zeros(VOCAB)
    kept[allowed] = p[allowed]
    return kept / kept.sum() if kept.sum() > 0 else p


@pytest.mark.parametrize("make", [all_tokens, thirds])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_token_is_dlite_s_likeliest_of_those_allowed(rule: Rule, make: Callable[[int], DLiteModel]) -> None:
    for seed in range(4):
        model, view = make(seed), guided(rule, seed=seed)
        (proposal,) = DLiteDrafter(model, TARGET.embedding).propose([view])
        path: list[int] = []
        for token, p in zip(proposal.tokens, distributions(model, view, proposal.tokens), strict=True):
            allowed = list(rule(path))
            assert token == (allowed[0] if len(allowed) == 1 else int(held(p, allowed).argmax()))
            path.append(token)
            if token == END:
                break
        assert len(proposal.tokens) == K


@pytest.mark.parametrize("make", [all_tokens, thirds])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_token_is_the_mixture_s_likeliest_of_those_allowed(rule: Rule, make: Callable[[int], DLiteModel]) -> None:
    lookup = LookupDrafter()
    for seed in range(4):
        model, view = make(seed), guided(rule, seed=seed)
        (proposal,) = HybridDrafter(lookup, DLiteDrafter(model, TARGET.embedding)).propose([view])
        path: list[int] = []
        for k, p in enumerate(distributions(model, view, proposal.tokens[:K])):
            copied, agreeing = lookup.copy_behind(np.array([*view.ids, *path], dtype=np.int32))
            mixed = p * (1 - chance(agreeing))
            mixed[copied] += chance(agreeing)
            mixed = held(mixed, list(rule(path)))
            only = len(rule(path)) == 1
            assert proposal.tokens[k] == (next(iter(rule(path))) if only else int(mixed.argmax()))
            assert proposal.confidence[k] == pytest.approx(1.0 if only else float(mixed.max()), abs=1e-5)
            path.append(proposal.tokens[k])
            if path[-1] == END:
                break


def test_tokens_that_stand_already_are_not_taken_twice() -> None:
    forced = [20, 22]
    for make in (all_tokens, thirds):
        view = guided(even, seed=0, forced=forced)
        (proposal,) = DLiteDrafter(make(), TARGET.embedding).propose([view])
        assert len(proposal.tokens) == K - 2
        assert all(token % 2 == 0 for token in proposal.tokens)


def test_texts_with_and_without_a_grammar_are_drafted_together() -> None:
    drafter = DLiteDrafter(all_tokens(), TARGET.embedding)
    views: list[Callable[[], DraftView]] = [
        lambda: guided(even, seed=1),
        lambda: replace(guided(even, seed=2), guide=None),
        lambda: guided(free_then_forced, seed=3),
    ]
    together = drafter.propose([make() for make in views])
    assert [list(p.tokens) for p in together] == [list(drafter.propose([make()])[0].tokens) for make in views]


@pytest.mark.parametrize("made", [lambda dlite: dlite, lambda dlite: HybridDrafter(LookupDrafter(), dlite)])
def test_a_seeded_draft_is_drawn_from_what_is_allowed(made: Callable[[DLiteDrafter], Drafter]) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    for make in (all_tokens, thirds):
        drafter = made(DLiteDrafter(make(), TARGET.embedding))
        for seed in range(5):
            view = replace(guided(even, seed=seed), draw=draft_draw(params, position=30))
            (proposal,) = drafter.propose([view])
            assert len(proposal.tokens) == K
            assert all(token % 2 == 0 for token in proposal.tokens)


class Watching:
    """Passes on, and keeps what it was shown."""

    name = "watching"

    def __init__(self, drafter: Drafter, *, fails: bool = False) -> None:
        self._drafter = drafter
        self._fails = fails
        self.guides: list[Guide | None] = []
        self.proposals: list[Proposal] = []

    def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
        for guide in self.guides:
            if guide is not None:  # it was of use for one proposal only
                assert guide.bitmask() is None
                guide.advance(0)
        self.guides += [view.guide for view in views]
        self.proposals += self._drafter.propose(views)
        if self._fails:
            raise RuntimeError("the drafter failed")
        return self.proposals[-len(views) :]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=6)])
def test_guided_drafts_change_no_token(sampling: SamplingParams, rule: Rule, fails: bool) -> None:
    texts = []
    for drafter, max_draft in ((Watching(DLiteDrafter(all_tokens(), TARGET.embedding), fails=fails), 7), (None, 0)):
        constraint = RuleConstraint(rule)
        request = Request(
            PROMPT, sampling=sampling, max_new_tokens=24, end_ids=ENDS, constraint=constraint, max_draft=max_draft
        )
        watching = drafter or Watching(LookupDrafter())
        text: list[int] = []
        for step in decode(TARGET, TargetState(TARGET.new_cache()), watching, request):
            text += step.tokens
            assert constraint.path == [token for token in text if token != END]
        assert not max_draft or fails or all(guide is not None for guide in watching.guides)
        texts.append(text)
    assert texts[0] == texts[1]


class Meddling:
    """Does with its guide what it should not."""

    name = "meddling"

    def __init__(self, how: str) -> None:
        self._how = how

    def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
        for view in views:
            assert isinstance(view.guide, Lookahead)
            if self._how == "writes":
                mask = view.guide.bitmask()
                assert mask is not None
                mask[:] = 0
            elif self._how == "ends":
                view.guide.advance(20)
                view.guide.end()
            else:
                view.guide.advance(torch.tensor(20.0))  # type: ignore[arg-type]
        return [Proposal((), self.name) for _ in views]


class CachedRule(RuleConstraint):
    """Keeps its mask, as a real grammar does."""

    kept: tuple[list[int], npt.NDArray[np.int32]] | None = None

    def bitmask(self) -> npt.NDArray[np.int32]:
        if self.kept is None or self.kept[0] != self.path:
            self.kept = (list(self.path), super().bitmask())
        return self.kept[1]


@pytest.mark.parametrize("how", ["writes", "ends", "mistypes"])
def test_a_drafter_that_meddles_with_its_guide_costs_its_draft_alone(how: str) -> None:
    texts = []
    for drafter in (LookupDrafter(), Meddling(how)):
        constraint = CachedRule(even)
        request = Request(PROMPT, max_new_tokens=8, end_ids=ENDS, constraint=constraint)
        text = [t for s in decode(TARGET, TargetState(TARGET.new_cache()), drafter, request) for t in s.tokens]
        assert constraint.path == text
        texts.append(text)
    assert texts[0] == texts[1]


class Noting(RuleConstraint):
    """Notes how far it was walked ahead, and may break there."""

    def __init__(self, rule: Rule, *, breaks_at: int = 100) -> None:
        super().__init__(rule)
        self.breaks_at = breaks_at
        self.furthest = 0

    def bitmask(self) -> npt.NDArray[np.int32]:
        if len(self.path) >= self.breaks_at:
            raise RuntimeError("the grammar is stuck")
        return super().bitmask()

    def advance(self, token_id: int) -> None:
        super().advance(token_id)
        self.furthest = max(self.furthest, len(self.path))


def decoding_of(constraint: RuleConstraint, drafter: Drafter, *, max_draft: int = K) -> Decoding:
    request = Request(PROMPT, max_new_tokens=12, end_ids=ENDS, constraint=constraint, max_draft=max_draft)
    return Decoding(TARGET, TargetState(TARGET.new_cache()), drafter, request)


def test_a_grammar_that_breaks_amid_a_draft_costs_its_own_text_alone() -> None:
    drafter = DLiteDrafter(all_tokens(), TARGET.embedding)
    broken, sound = decoding_of(Noting(even, breaks_at=5), drafter), decoding_of(RuleConstraint(even), drafter)
    run_pass(TARGET, [broken, sound], FixedLength())  # prefill
    broken_step, sound_step = run_pass(TARGET, [broken, sound], FixedLength())
    assert broken_step is None
    assert "stuck" in str(broken.error)
    assert sound.error is None
    assert sound_step is not None
    assert (sound_step.num_proposed, sound_step.num_faults) == (K, 0)


def test_a_grammar_is_asked_no_further_than_its_text_has_room_for() -> None:
    drafter = DLiteDrafter(all_tokens(), TARGET.embedding)
    short, long = Noting(even), Noting(even)
    both = [decoding_of(short, drafter, max_draft=2), decoding_of(long, drafter)]
    run_pass(TARGET, both, FixedLength())
    run_pass(TARGET, both, FixedLength())
    assert (short.furthest, long.furthest) == (1 + 2, 1 + K)


def test_an_interrupted_draft_leaves_the_grammar_behind_the_text() -> None:
    class Interrupted:
        name = "interrupted"

        def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
            assert views[0].guide is not None
            views[0].guide.advance(40)
            raise KeyboardInterrupt

    constraint = RuleConstraint(two_forced_then_even)
    decoding = decoding_of(constraint, Interrupted())
    run_pass(TARGET, [decoding], FixedLength())
    with pytest.raises(KeyboardInterrupt):
        run_pass(TARGET, [decoding], FixedLength())
    assert constraint.path == decoding.state.ids[len(PROMPT) :].tolist()


def test_forced_tokens_amid_a_draft_are_the_grammar_s() -> None:
    watching = Watching(DLiteDrafter(all_tokens(), TARGET.embedding))
    request = Request(PROMPT, max_new_tokens=24, end_ids=ENDS, constraint=RuleConstraint(free_then_forced))
    steps = list(decode(TARGET, TargetState(TARGET.new_cache()), watching, request))
    assert steps[1].num_proposed == K
    assert list(watching.proposals[0].tokens[2:5]) == [7, 8, 9]  # one free token is the prefill's
    assert {source for step in steps for source in step.sources} >= {"forced", "bonus"}


def test_under_rejection_no_draft_depends_on_the_grammar() -> None:
    watching = Watching(DLiteDrafter(all_tokens(), TARGET.embedding))
    params = SamplingParams(temperature=1.0, seed=1, verification="rejection")
    request = Request(PROMPT, sampling=params, max_new_tokens=12, end_ids=ENDS, constraint=RuleConstraint(even))
    list(decode(TARGET, TargetState(TARGET.new_cache()), watching, request))
    assert watching.guides
    assert set(watching.guides) == {None}
