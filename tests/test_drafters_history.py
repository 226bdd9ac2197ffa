"""The baselines keep a history: it follows every change of the text, grows with it, and changes nothing written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlite_agent.drafters import baselines, loading
from dlite_agent.drafters.dspark import DSparkDrafter, DSparkModel
from dlite_agent.drafters.history import KINDS, FixedRows, KeyValues, Kind
from dlite_agent.drafters.independent import IndependentDrafter, IndependentModel
from dlite_agent.drafters.loading import layers_read, load_drafter, trained_for
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import DraftView, Proposal, RowReader, TextKey
from dlite_agent.engine.decode import Decoding, decode, resume, run_pass
from dlite_agent.engine.draft_length import FixedLength
from dlite_agent.engine.request import Request, Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError, DrafterError, DrafterFormatError, DrafterMismatchError
from dlite_agent.testing import random_baseline, tiny_target, write_tiny_chat_model

PROMPT = tuple(range(3, 40))


def drafter_of(kind: Kind, target: Target) -> DSparkDrafter | IndependentDrafter:
    model = random_baseline(target, kind)
    if isinstance(model, DSparkModel):
        return DSparkDrafter(model, target.embedding, target.head)
    assert isinstance(model, IndependentModel)
    return IndependentDrafter(model, target.embedding, target.head)


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


class Remembers:
    """Passes on to a drafter, and keeps what it saw and said."""

    def __init__(self, drafter: DSparkDrafter | IndependentDrafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.said: list[tuple[DraftView, Proposal]] = []

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        proposals = self.drafter.propose(views)
        self.said += [(replace(v, ids=v.ids.copy()), p) for v, p in zip(views, proposals, strict=True)]
        return proposals


class RemembersRows(Remembers):
    """As well for a drafter that reads rows."""

    def num_read(self, text: TextKey) -> int:
        assert isinstance(self.drafter, DSparkDrafter)
        return self.drafter.num_read(text)

    def read(self, text: TextKey, start: int, features: torch.Tensor) -> None:
        assert isinstance(self.drafter, DSparkDrafter)
        self.drafter.read(text, start, features)


def remembering(kind: Kind, target: Target) -> Remembers:
    return (RemembersRows if kind == "dspark" else Remembers)(drafter_of(kind, target))


def draft_from_nothing(kind: Kind, target: Target, view: DraftView) -> Proposal:
    """What a drafter proposes that sees the text for the first time."""
    drafter, key = drafter_of(kind, target), TextKey()
    if isinstance(drafter, DSparkDrafter):
        ids = view.ids.tolist()[:-1]
        drafter.read(key, 0, target.forward(ids, target.new_cache(), num_features=len(ids)).features)
    (proposal,) = drafter.propose([DraftView(view.ids, view.drafted, None, view.max_tokens, view.draw, key)])
    return proposal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_history_that_followed_all_turns_drafts_as_one_made_now(
    llama: Target, kind: Kind, temperature: float
) -> None:
    drafter, state = remembering(kind, llama), TargetState(llama.new_cache())
    sampling = SamplingParams(temperature, seed=4) if temperature else SamplingParams()
    turns = [PROMPT, [*PROMPT[:20], 90, 91, 92], [*PROMPT[:20], 90, 91, 92, *range(50, 80)], PROMPT[:12]]
    for prompt in turns:  # goes on, changes in the middle, goes on, is cut
        request = Request(list(prompt), sampling=sampling, max_new_tokens=12)
        steps = list(decode(llama, state, drafter, request))
        plain = list(decode(llama, TargetState(llama.new_cache()), NullDrafter(), request))
        assert text_of(steps) == text_of(plain)
        list(resume(llama, state, drafter, Request((), sampling=sampling, max_new_tokens=5)))
    assert len(drafter.said) > 20
    for view, proposal in drafter.said:
        assert len(proposal.tokens) == view.max_tokens
        expected = draft_from_nothing(kind, llama, view)
        assert list(proposal.tokens) == list(expected.tokens)
        assert np.allclose(proposal.confidence, expected.confidence, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_continues_forced_tokens(llama: Target, kind: Kind) -> None:
    ids = np.array(PROMPT, dtype=np.int32)
    whole = draft_from_nothing(kind, llama, DraftView(ids, (), None, 7))
    behind = draft_from_nothing(kind, llama, DraftView(ids, tuple(whole.tokens[:3]), None, 7))
    assert list(behind.tokens)[:4] == list(whole.tokens)[3:]
    other = draft_from_nothing(kind, llama, DraftView(ids, (1, 5, 9), None, 4))
    assert list(other.tokens) != list(whole.tokens)[3:]
    assert not draft_from_nothing(kind, llama, DraftView(ids, tuple(range(7)), None, 4)).tokens


def test_only_dspark_needs_to_be_shown_rows_and_the_target_computes_what_it_has_not_read(llama: Target) -> None:
    for kind in KINDS:
        drafter, state = drafter_of(kind, llama), TargetState(llama.new_cache())
        assert isinstance(drafter, RowReader) == (kind == "dspark")
        list(decode(llama, state, drafter, Request(PROMPT, max_new_tokens=4)))
        longer = [*PROMPT, *state.ids[len(PROMPT) :].tolist(), 7, 8, 9]
        first = next(iter(decode(llama, state, drafter, Request(longer, max_new_tokens=1))))
        assert first.num_reused >= len(PROMPT) + 3
        restarted = drafter_of(kind, llama)  # as in a new process: the target's rows are there, the drafter's are not
        step = next(iter(decode(llama, state, restarted, Request(longer, max_new_tokens=1))))
        assert step.num_reused == (0 if kind == "dspark" else len(longer) - 1)
        state.truncate(len(PROMPT))
        again = drafter_of(kind, llama)
        given = text_of(list(resume(llama, state, again, Request((), max_new_tokens=6))))
        plain = decode(llama, TargetState(llama.new_cache()), NullDrafter(), Request(PROMPT, max_new_tokens=6))
        assert given == text_of(list(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_the_history_grows_with_the_text_and_goes_with_it(llama: Target, kind: Kind) -> None:
    drafter = drafter_of(kind, llama)
    sizes = []
    states = [TargetState(llama.new_cache()) for _ in range(2)]
    for state, length in zip(states, (20, 400), strict=True):
        list(decode(llama, state, drafter, Request([i % 150 for i in range(length)], max_new_tokens=3)))
        sizes.append(drafter.state_bytes())
    config = drafter.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert sizes[1] >= 2 * 400 * per_token > 0
    del state, states[1]
    assert drafter.state_bytes() == sizes[0]
    states.clear()
    assert drafter.state_bytes() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_one_pass_have_histories_of_their_own(llama: Target, kind: Kind) -> None:
    drafter = drafter_of(kind, llama)
    prompts = [PROMPT, PROMPT[:9], tuple(range(60, 100))]
    decodings = [
        Decoding(llama, TargetState(llama.new_cache()), drafter, Request(p, max_new_tokens=15)) for p in prompts
    ]
    texts: list[list[int]] = [[] for _ in prompts]
    for decoding in decodings:
        while decoding.needs_own_pass:
            run_pass(llama, [decoding], FixedLength())
    while not all(decoding.is_done for decoding in decodings):
        open_ones = [i for i, decoding in enumerate(decodings) if not decoding.is_done]
        for i, step in zip(open_ones, run_pass(llama, [decodings[i] for i in open_ones], FixedLength()), strict=True):
            texts[i] += step.tokens if step else ()
    for decoding, prompt in zip(decodings, prompts, strict=True):
        assert decoding.error is None
        plain = decode(llama, TargetState(llama.new_cache()), NullDrafter(), Request(prompt, max_new_tokens=15))
        assert decoding.state.ids[len(prompt) :].tolist() == text_of(list(plain))


def test_a_reader_that_fails_costs_its_drafts_only(llama: Target, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(DSparkDrafter):
        def read(self, text: TextKey, start: int, features: torch.Tensor) -> None:
            raise RuntimeError("no room")

    model = random_baseline(llama, "dspark")
    assert isinstance(model, DSparkModel)
    broken = Broken(model, llama.embedding, llama.head)
    steps = list(decode(llama, TargetState(llama.new_cache()), broken, Request(PROMPT, max_new_tokens=6)))
    plain = list(decode(llama, TargetState(llama.new_cache()), NullDrafter(), Request(PROMPT, max_new_tokens=6)))
    assert text_of(steps) == text_of(plain)
    assert sum(step.num_proposed for step in steps) == 0
    assert "no room" in caplog.text


@pytest.mark.parametrize("answer", [RuntimeError("lost"), -1, 2.5, None], ids=str)
def test_a_reader_that_cannot_say_what_it_read_gets_no_row_again(
    llama: Target, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful:
        @property
        def name(self) -> str:
            raise RuntimeError("no name either")

        def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
            return NullDrafter().propose(views)

        def num_read(self, text: TextKey) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        def read(self, text: TextKey, start: int, features: torch.Tensor) -> None:
            pass

    state = TargetState(llama.new_cache())
    given = text_of(list(decode(llama, state, Forgetful(), Request(PROMPT, max_new_tokens=6))))
    longer = Request([*PROMPT, *given, 7, 8], max_new_tokens=6)
    steps = list(decode(llama, state, Forgetful(), longer))
    assert text_of(steps) == text_of(list(decode(llama, TargetState(llama.new_cache()), NullDrafter(), longer)))
    assert steps[0].num_reused == len(PROMPT) + 5
    assert "drafter Forgetful" in caplog.text


def test_a_gap_in_what_was_read_is_refused(llama: Target) -> None:
    drafter = drafter_of("dspark", llama)
    assert isinstance(drafter, DSparkDrafter)
    with pytest.raises(ValueError, match="rows from 3 on, but only 0"):
        drafter.read(TextKey(), 3, torch.zeros(1, len(llama.layer_ids), llama.hidden_size))


def test_a_block_sees_all_rows_before_it_and_none_behind(llama: Target) -> None:
    model = random_baseline(llama, "dspark")
    assert isinstance(model, DSparkModel)
    features = torch.randn(12, len(llama.layer_ids), llama.hidden_size)
    anchors, positions = torch.tensor([5, 9, 5]), torch.tensor([1, 6, 12])

    def hidden(rows: torch.Tensor, chosen: slice = slice(None)) -> torch.Tensor:
        before = FixedRows(model.read(rows, start=0))
        return model.hidden(anchors[chosen], positions[chosen], before, llama.embedding)

    with torch.no_grad():
        together = hidden(features)
        for i, position in enumerate(positions.tolist()):
            alone = hidden(features[:position], slice(i, i + 1))
            assert torch.allclose(together[i], alone[0], atol=1e-5)
            for row in range(12):
                changed = features.clone()
                changed[row] += 1
                is_same = torch.allclose(hidden(changed)[i], together[i], atol=1e-6)
                assert is_same == (row >= position)


def test_reading_in_pieces_is_reading_at_once(llama: Target) -> None:
    model = random_baseline(llama, "independent")
    assert isinstance(model, IndependentModel)
    tokens = torch.tensor([i * 7 % 150 for i in range(30)])
    with torch.no_grad():
        empty = KeyValues(2)
        whole, _ = model.read(tokens, start=0, before=empty, embedding=llama.embedding)
        cache, pieces = KeyValues(2), []
        for start, stop in ((0, 1), (1, 11), (11, 12), (12, 30)):
            part = tokens[start:stop]
            pieces.append(model.read(part, start=start, before=cache, embedding=llama.embedding)[0])
            cache.keep(len(part))
        assert torch.allclose(torch.cat(pieces), whole, atol=1e-5)
        rows = FixedRows(model.read(tokens, start=0, before=KeyValues(2), embedding=llama.embedding)[1])
        positions = torch.tensor([0, 4, 21])
        drafted = torch.stack([tokens[p : p + 3] for p in positions.tolist()])
        behind = model.behind(drafted, positions, rows, llama.embedding)
        for i, p in enumerate(positions.tolist()):
            assert torch.allclose(behind[i], whole[p : p + 3], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_as_it_was(llama: Target, kind: Kind, tmp_path: Path) -> None:
    model = random_baseline(llama, kind)
    baselines.save(model, tmp_path, target_names=["a/b"])
    loaded = baselines.load(tmp_path)
    assert loaded.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    drafter = load_drafter(str(tmp_path), llama)
    assert drafter.name == kind
    assert layers_read(str(tmp_path), llama) == (llama.layer_ids if kind == "dspark" else ())
    with pytest.raises(DrafterMismatchError, match="hidden_size"):
        load_drafter(str(tmp_path), tiny_target("llama", hidden_size=64))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("baseline", "eagle", "kind is 'eagle'"),
        ("baseline", None, "baseline is None"),
        ("rank", 0, "rank 0"),
        ("target_layer_ids", [], "target_layer_ids"),
        ("target_layer_ids", ["1"], "target_layer_ids"),
        ("draft_vocab_size", 161, "draft_vocab_size is 161"),
        ("num_drafts", 0, "num_drafts is 0"),
        ("hidden_size", 48, r"has shape \[32\]; expected \[48\]"),
        ("num_hidden_layers", 3, "lacks the tensor layers.2"),
        ("head_dim", 15, "head_dim is 15"),
        ("rope_theta", "much", "rope_theta is 'much'"),
        ("attention_bias", 1, "attention_bias is 1"),
        ("target_names", "a", "target_names is 'a'"),
    ],
)
def test_a_damaged_configuration_is_refused_by_name(
    llama: Target, tmp_path: Path, name: str, value: object, problem: str
) -> None:
    baselines.save(random_baseline(llama, "dspark"), tmp_path / "d", target_names=["x"])
    path = tmp_path / "d" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DrafterFormatError, match=problem):
        _ = (baselines.load(tmp_path / "d"), baselines.read_target_names(tmp_path / "d"))


def test_packaged_baselines_are_found_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(write_tiny_chat_model(tmp_path / "tiny-chat"))
    for spec in ("dlite", *KINDS):
        with pytest.raises(DrafterError, match="TRAINING"):
            load_drafter(spec, target)
    for kind in KINDS:
        baselines.save(random_baseline(target, kind), tmp_path / "trained" / kind, target_names=["tiny-chat"])
    monkeypatch.setattr(loading, "trained_for", partial(trained_for, folder=tmp_path / "trained"))
    assert [load_drafter(kind, target).name for kind in KINDS] == list(KINDS)
    assert load_drafter("auto", target).name == "lookup"
    with pytest.raises(DrafterError, match="dlite"):
        load_drafter("dlite", target)


def test_output_rows_that_are_int8_only_are_refused(llama: Target) -> None:
    assert llama.head.shape == llama.embedding.shape
    assert not torch.equal(llama.head, llama.embedding)
    tied = tiny_target("llama", tie_word_embeddings=True, quantize="int8")
    assert torch.equal(tied.head, tied.embedding)
    with pytest.raises(ConfigError, match="int8 only"):
        _ = tiny_target("llama", quantize="int8").head
