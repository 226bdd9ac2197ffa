"""Wherever a session goes back to, what comes next is what a fresh prefill gives, in every family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache as cached
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.decode import decode
from dlite_agent.engine.families import FAMILIES, RECURRENT_FAMILIES
from dlite_agent.engine.recurrent import MAX_KEPT_CHECKPOINTS, MAX_REWIND, RecurrentCache, RecurrentLayer
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import UnsupportedModelError
from dlite_agent.testing import ScriptedDrafter, tiny_target

VOCAB = 160
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen2-sliding": ("qwen2", WINDOW | {"max_window_layers": 2}),
    "qwen3-sliding": ("qwen3", WINDOW | {"max_window_layers": 1}),
    "smollm3-sliding": ("smollm3", WINDOW | {"no_rope_layer_interval": 2}),
    "phi3-sliding": ("phi3", {"sliding_window": 8}),
    "lfm2-wide": ("lfm2", {"conv_L_cache": 6, "conv_bias": True}),
    "lfm2-attention-only": ("lfm2", {"layer_types": ["full_attention"] * 4}),
    "qwen3_5-recurrent-last": ("qwen3_5_text", {"layer_types": ["full_attention", *["linear_attention"] * 3]}),
}
RECURRENT = [name for name, (family, _) in VARIANTS.items() if family in RECURRENT_FAMILIES and "only" not in name]
DELTA_RULE = [name for name in RECURRENT if name.startswith("qwen")]


@cached
def target_of(name: str) -> Target:
    family, fields = VARIANTS[name]
    return tiny_target(family, **fields)


@pytest.fixture(params=VARIANTS)
def any_target(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


@pytest.fixture(params=RECURRENT)
def recurrent(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


@pytest.fixture(params=DELTA_RULE)
def delta_rule(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


def random_ids(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, size=length).tolist()
    return ids


def prefilled(target: Target, ids: Sequence[int], *, keep: Sequence[int] = (), newest: int | None = None) -> SlabCache:
    """Run `ids` in the pieces that the checkpoints cut them into."""
    cache = target.new_cache()
    stops: list[int] = sorted({*keep, len(ids)} | (set() if newest is None else {newest}))
    for start, stop in zip([0, *stops], stops, strict=False):
        target.forward(ids[start:stop], cache)
        if stop in keep or stop == newest:
            cache.checkpoint(keep=stop in keep)
    return cache


def check_what_comes_next(target: Target, cache: SlabCache, ids: Sequence[int]) -> None:
    """Run what `cache` lacks of `ids`: logits, best tokens (ties aside) and features are those of a fresh prefill."""
    rest = ids[cache.num_rows :]
    assert rest
    wanted = {"num_logits": len(rest), "num_features": len(rest)}
    continued = target.forward(rest, cache, **wanted)
    fresh = target.forward(ids, target.new_cache(), **wanted)
    assert cache.num_rows == len(ids)
    assert (continued.logits - fresh.logits).abs().max() <= 1e-4
    best = fresh.logits.gather(1, continued.logits.argmax(-1, keepdim=True))
    assert (fresh.logits.amax(-1, keepdim=True) - best).max() <= 1e-4
    assert (continued.features - fresh.features).abs().max() <= 1e-4


def test_every_crop_position_gives_the_logits_of_a_fresh_prefill(any_target: Target) -> None:
    """Past the sliding window too; a session in the middle goes on with several rows at once."""
    ids = random_ids(40)
    keep, newest = (4, 11, 12), 30
    for stop in range(len(ids) + 3):
        cache = prefilled(any_target, ids, keep=keep, newest=newest)
        cache.crop_to(stop)
        assert cache.num_rows <= stop
        if any_target.is_restorable:
            assert cache.num_rows == min(stop, len(ids))
        check_what_comes_next(any_target, cache, [*ids[:stop], *random_ids(5, seed=stop)])


def test_a_delta_rule_returns_to_the_newest_checkpoint_that_is_not_too_late(delta_rule: Target) -> None:
    ids, rows = random_ids(20), {}
    for stop in (0, 3, 4, 10, 11, 15, 16, 17, 19, 20, 100):
        cache = prefilled(delta_rule, ids, keep=(4, 11), newest=16)
        cache.crop_to(stop)
        rows[stop] = cache.num_rows
    assert rows == {0: 0, 3: 0, 4: 4, 10: 4, 11: 11, 15: 11, 16: 16, 17: 16, 19: 16, 20: 20, 100: 20}


@pytest.mark.parametrize("name", ["lfm2", "lfm2-wide"])
def test_a_convolution_goes_back_some_rows_without_a_checkpoint_and_no_further(name: str) -> None:
    target, ids = target_of(name), random_ids(40 + MAX_REWIND)
    for stop in range(len(ids)):
        cache = prefilled(target, ids, keep=(7,))
        cache.crop_to(stop)
        is_near = stop >= len(ids) - MAX_REWIND
        assert cache.num_rows == (stop if is_near else 7 if stop >= 7 else 0)
        if stop % 9 == 0 or cache.num_rows in (len(ids) - MAX_REWIND, 7):
            check_what_comes_next(target, cache, [*ids[:stop], *random_ids(3, seed=stop)])


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_passes_checkpoints_and_crops_stays_exact(any_target: Target, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, ids = any_target.new_cache(), list[int]()
    for _ in range(30):
        action = rng.choice(["pass", "pass", "checkpoint", "keep", "crop", "short crop"])
        if action == "pass" and len(ids) < 120:
            ids = [*ids, *random_ids(int(rng.integers(1, 20)), seed=int(rng.integers(1 << 30)))]
            check_what_comes_next(any_target, cache, ids)
        elif action in ("checkpoint", "keep"):
            cache.checkpoint(keep=action == "keep")
        elif ids:
            depth = len(ids) if action == "crop" else 4
            stop = max(0, len(ids) - int(rng.integers(0, depth)))
            cache.crop_to(stop)
            assert cache.num_rows <= stop
            ids = ids[: cache.num_rows]
    check_what_comes_next(any_target, cache, [*ids, 3, 1, 4])


@pytest.mark.parametrize(
    "sizes", [[1] * 50, [3] * 16 + [2], [33, 1, 16], [1, 49], [49, 1]], ids=["1", "3", "33-1-16", "1-49", "49-1"]
)
def test_a_prefill_in_pieces_is_the_unmodified_models(any_target: Target, sizes: list[int]) -> None:
    """In pieces with our attention and our cache, whole with transformers' own."""
    ids = random_ids(50, seed=5)
    unmodified = AutoModelForCausalLM.from_config(copy.deepcopy(any_target.config), attn_implementation="sdpa")
    unmodified.load_state_dict(any_target.model.state_dict())
    with torch.inference_mode():
        expected = unmodified.eval()(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    cache, outputs, start = any_target.new_cache(), [], 0
    for size in sizes:
        outputs.append(any_target.forward(ids[start : start + size], cache, num_logits=size, num_features=size))
        start += size
    assert (torch.cat([output.logits for output in outputs]) - expected.logits[0]).abs().max() <= 1e-4
    features = torch.cat([output.features for output in outputs])
    for index, layer in enumerate(any_target.layer_ids):
        assert (features[:, index] - expected.hidden_states[layer + 1][0]).abs().max() <= 1e-4


def test_verify_passes_over_wrong_drafts_write_the_plain_text(any_target: Target) -> None:
    """A speculative loop in small: what a crop drops below the accepted rows is run again with the next draft."""
    prompt, num_tokens = random_ids(12, seed=2), 24
    plain = list(prompt)
    for _ in range(num_tokens):
        plain.append(int(any_target.forward(plain, any_target.new_cache()).logits[-1].argmax()))
    cache, text = any_target.new_cache(), list(prompt)
    any_target.forward(prompt[:-1], cache)
    cache.checkpoint(keep=True)
    while len(text) < len(plain):
        draft = plain[len(text) : len(text) + 5]
        draft = [(token + 1) % VOCAB if (len(text) + i) % 4 == 3 else token for i, token in enumerate(draft)]
        cache.checkpoint()
        rows = [*text[cache.num_rows :], *draft]
        drawn = any_target.forward(rows, cache, num_logits=len(draft) + 1).logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == drawn[accepted]:
            accepted += 1
        text += drawn[: accepted + 1]
        cache.crop_to(len(text) - 1)
    assert text[: len(plain)] == plain


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_speculative_session_of_several_turns_writes_the_plain_text(family: str) -> None:
    """The decode loop itself: prompts that go on, that repeat, and that depart in the middle of what was there."""
    target = target_of(family)
    state, first = TargetState(target.new_cache()), random_ids(15)
    for prompt in (first, [*first, 7, 8, 9], [*first, 7, 8, 9], [*first[:10], 5, 6]):
        request = Request(prompt, max_new_tokens=20)
        plain = decode(target, TargetState(target.new_cache()), NullDrafter(), request)
        text = [token for step in plain for token in step.tokens]
        drafts = [(token + 1) % VOCAB if i % 5 == 3 else token for i, token in enumerate(text)]
        steps = list(decode(target, state, ScriptedDrafter(drafts, start=len(prompt)), request))
        assert [token for step in steps for token in step.tokens] == text
        assert len(steps) < len(text)


def test_the_checkpoints_of_steps_do_not_push_out_the_kept_ones(delta_rule: Target) -> None:
    cache = delta_rule.new_cache()
    for row in range(1, 60):
        delta_rule.forward([row], cache)
        cache.checkpoint(keep=row in (5, 6, 7, 8, 9, 10))
        cache.checkpoint(keep=row == 10)
    reached = []
    for stop in (58, 10, 9, 8, 7, 6):
        cache.crop_to(stop)
        reached.append(cache.num_rows)
    assert MAX_KEPT_CHECKPOINTS == 4
    assert reached == [10, 10, 9, 8, 7, 0]


def test_going_back_forgets_the_checkpoints_of_the_text_that_was_dropped(recurrent: Target) -> None:
    ids, others = random_ids(30), random_ids(30, seed=1)
    cache = prefilled(recurrent, ids, keep=(5, 10, 20), newest=25)
    cache.crop_to(10)
    check_what_comes_next(recurrent, cache, [*ids[:10], *others])
    cache.crop_to(26)
    assert cache.num_rows in (10, 26)
    check_what_comes_next(recurrent, cache, [*ids[:10], *others[:16], 1])


def test_a_second_crop_starts_from_the_first(recurrent: Target) -> None:
    ids = random_ids(30)
    cache = prefilled(recurrent, ids, keep=(5, 10), newest=25)
    for stop in (27, 12, 12, 7, 3):
        cache.crop_to(stop)
        assert cache.num_rows <= stop
        cache.crop_to(cache.num_rows)
        check_what_comes_next(recurrent, copy.deepcopy(cache), [*ids[: cache.num_rows], 9, 8, 7])
    cache.crop(-1)
    assert cache.num_rows <= 2
    cache.reset()
    assert cache.num_rows == 0
    check_what_comes_next(recurrent, cache, ids)


def fail(*_: Any, **__: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("checkpoint", [None, 4, 10])
def test_a_failed_pass_leaves_the_cache_where_it_was_or_at_a_checkpoint(
    any_target: Target, checkpoint: int | None
) -> None:
    ids = random_ids(13)
    layers: Any = any_target.model.get_decoder().layers
    for layer in range(4):
        for register in (layers[layer].register_forward_hook, layers[layer].register_forward_pre_hook):
            cache = prefilled(any_target, ids[:10], newest=checkpoint)
            handle = register(fail)
            with pytest.raises(MemoryError):
                any_target.forward(ids[10:], cache)
            handle.remove()
            assert cache.num_rows in ((10,) if any_target.is_restorable else (10, checkpoint or 0))
            check_what_comes_next(any_target, cache, ids)


def test_a_pass_that_fails_between_the_two_halves_of_a_state_is_undone(delta_rule: Target) -> None:
    """Wherever one asks it to go: a convolution that is ahead of its layer's memory counts for nothing."""
    ids = random_ids(13)
    for which in (0, -1):
        for stop in (10, 11, 13, 20):
            cache = prefilled(delta_rule, ids[:10], newest=10)
            layer = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)][which]
            layer.update_recurrent_state = fail  # type: ignore[method-assign, assignment]
            with pytest.raises(MemoryError), torch.inference_mode():
                delta_rule.model(torch.tensor([ids[10:]]), cache=cache)
            del layer.update_recurrent_state
            cache.crop_to(stop)
            assert cache.num_rows == 10
            check_what_comes_next(delta_rule, cache, ids)


def test_passes_of_any_width_leave_a_checkpoints_tensors_alone(recurrent: Target) -> None:
    cache = prefilled(recurrent, random_ids(20))
    cache.checkpoint(keep=True)
    layers = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    tensors = [tensor for layer in layers for tensor in layer.state.tensors()]
    before = [tensor.clone() for tensor in tensors]
    for size in (1, 3, 1, 70, 1):
        recurrent.forward(random_ids(size, seed=size), cache)
    assert tensors
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_a_long_prefill_keeps_no_more_inputs_than_going_back_needs(recurrent: Target) -> None:
    cache = prefilled(recurrent, random_ids(200))
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            assert layer.state.inputs is not None
            assert layer.state.inputs.shape[-1] <= MAX_REWIND + 6
            assert layer.state.inputs.untyped_storage().nbytes() == layer.state.inputs.nbytes


def test_nbytes_counts_states_and_checkpoints_once(delta_rule: Target) -> None:
    cache = prefilled(delta_rule, random_ids(10))
    layers = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
    state_bytes = sum(tensor.nbytes for layer in layers for tensor in layer.state.tensors())
    slab_bytes = SlabCache.nbytes.fget(cache)  # type: ignore[attr-defined]
    assert cache.nbytes == slab_bytes + state_bytes
    cache.checkpoint(keep=True)
    cache.checkpoint()
    assert cache.nbytes == slab_bytes + state_bytes
    delta_rule.forward([1, 2], cache)
    assert cache.nbytes == slab_bytes + 2 * state_bytes
    cache.crop_to(0)
    assert cache.nbytes == slab_bytes


def test_a_convolutions_checkpoint_holds_no_more_than_its_kernel_sees() -> None:
    target = target_of("lfm2")
    cache = prefilled(target, random_ids(100))
    before = cache.nbytes
    cache.checkpoint()
    assert cache.nbytes - before == 2 * target.config.conv_L_cache * target.hidden_size * 4  # two layers of fp32


def test_only_families_without_state_are_packed_or_restored_from_rows(any_target: Target) -> None:
    cache = any_target.new_cache()
    any_target.forward([1, 2, 3], cache)
    assert any_target.is_packable == any_target.is_restorable == (type(cache) is SlabCache)
    if any_target.is_restorable:
        restored = any_target.new_cache()
        restored.append(cache.rows(0, 3))
        check_what_comes_next(any_target, restored, [1, 2, 3, 4])
        return
    with pytest.raises(UnsupportedModelError, match="is_restorable"):
        cache.rows(0, 3)
    with pytest.raises(UnsupportedModelError, match="is_restorable"):
        cache.append(torch.zeros(1))


def crop_slabs_only(cache: RecurrentCache, num_rows: int) -> None:
    SlabCache.crop_to(cache, num_rows)


def crop_slabs_and_empty_states(cache: RecurrentCache, num_rows: int) -> None:
    SlabCache.crop_to(cache, num_rows)
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            layer.reset()


def restore_one_layer_less(cache: RecurrentCache, num_rows: int) -> None:
    last = next(layer for layer in reversed(cache.layers) if isinstance(layer, RecurrentLayer))
    state = last.state
    RecurrentCache.crop_to(cache, num_rows)
    last.restore(state)


def crop_states_only(cache: RecurrentCache, num_rows: int) -> None:
    layers = [layer for layer in cache.layers if not isinstance(layer, RecurrentLayer)]
    rows = layers[0].num_rows
    RecurrentCache.crop_to(cache, num_rows)
    for layer in layers:
        layer.num_rows = rows - 1


@pytest.mark.parametrize(
    "crop", [crop_slabs_only, crop_slabs_and_empty_states, restore_one_layer_less, crop_states_only]
)
def test_a_crop_that_forgets_some_state_is_noticed(
    recurrent: Target, crop: Callable[[RecurrentCache, int], None]
) -> None:
    """The checker of this file's tests can fail."""
    ids = random_ids(30)
    cache = prefilled(recurrent, ids, newest=20)
    assert isinstance(cache, RecurrentCache)
    crop(cache, 20)
    with pytest.raises(AssertionError):
        check_what_comes_next(recurrent, cache, [*ids[:20], *random_ids(12, seed=3)])


SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("gemma2", SMALL, "'gemma2'"),
        ("gpt_oss", SMALL, "'gpt_oss'"),
        ("mamba2", {"num_hidden_layers": 2}, "'mamba2'"),
        ("qwen3_next", SMALL, "'qwen3_next'"),
        ("lfm2_moe", SMALL, "'lfm2_moe'"),
        ("paligemma", {}, "'gemma'"),
        ("whisper", {}, "'whisper'"),
        ("phi3", SMALL | {"rope_parameters": LONGROPE, "head_dim": 8}, "'longrope' changes old keys"),
        ("qwen3", SMALL | {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ("qwen3", SMALL | {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ("lfm2", SMALL | {"layer_types": ["conv", "linear_attention"]}, "'linear_attention'"),
        ("lfm2", SMALL | {"layer_types": ["conv", "conv"]}, "without an attention layer"),
        ("qwen3_5_text", SMALL | {"layer_types": ["linear_attention"] * 2}, "without an attention layer"),
        ("gemma3_text", SMALL | {"attn_logit_softcapping": 50.0}, "capped at 50"),
        ("gemma3_text", SMALL | {"use_bidirectional_attention": True}, "bidirectional"),
        ("llama", SMALL | {"is_causal": False}, "bidirectional"),
        ("llama", SMALL | {"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*unquantized"),
        ("qwen3_5", {"quantization_config": {"quant_method": "awq"}}, "'awq'.*unquantized"),
    ],
)
def test_what_would_not_be_exact_is_refused_before_its_weights_are_read(
    tmp_path: Path, model_type: str, fields: dict[str, Any], match: str
) -> None:
    AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=match):
        Target.load(tmp_path)


def test_int8_weights_are_refused_where_rows_do_not_keep_their_bits() -> None:
    for family in RECURRENT_FAMILIES:
        with pytest.raises(UnsupportedModelError, match=f"{family}.*without quantize"):
            tiny_target(family, quantize="int8")


def test_the_text_part_of_a_model_for_images_is_loaded(tmp_path: Path) -> None:
    """Qwen3.5 is published as one model for images and text."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = target_of("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    whole.save_pretrained(tmp_path)
    target, ids = Target.load(tmp_path), random_ids(20)
    with torch.inference_mode():
        expected = whole(torch.tensor([ids])).logits[0, -1]
    assert (target.forward(ids, target.new_cache()).logits[0] - expected).abs().max() <= 1e-4
    check_what_comes_next(target, prefilled(target, ids[:10]), ids)
