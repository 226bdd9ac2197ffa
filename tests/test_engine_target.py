"""The target is the unmodified transformers model, with features of just the rows wanted."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.engine import attention
from dlite_agent.engine.decode import decode
from dlite_agent.engine.packed import Segment
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target, fingerprint_of
from dlite_agent.errors import ConfigError, CorruptModelError, UnsupportedModelError
from dlite_agent.testing import tiny_target, write_tiny_chat_model

IDS: list[int] = np.random.default_rng(5).integers(0, 160, size=50).tolist()


def unmodified(target: Target) -> Any:
    """The same weights in a model that transformers made, with its own attention."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(target.config), attn_implementation="sdpa")
    model.load_state_dict(target.model.state_dict())
    assert model.config._attn_implementation == "sdpa"
    return model.eval()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    unmodified(tiny_target("qwen2")).save_pretrained(folder)
    return folder


def test_logits_and_features_are_those_of_the_unmodified_model(target: Target) -> None:
    with torch.inference_mode():
        expected = unmodified(target)(torch.tensor([IDS]), output_hidden_states=True)
    output = target.forward(IDS, target.new_cache(), num_logits=len(IDS), num_features=len(IDS))
    assert (output.logits - expected.logits[0]).abs().max() <= 1e-4
    assert target.layer_ids == (0, 1, 2, 3)
    for index, layer in enumerate(target.layer_ids):
        # transformers puts the embeddings first, and the last entry is the output of the final norm.
        assert (output.features[:, index] - expected.hidden_states[layer + 1][0]).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [1, 3, 16, 33])
def test_a_prefill_in_chunks_is_a_whole_prefill(target: Target, chunk: int) -> None:
    cache = target.new_cache()
    for start in range(0, len(IDS), chunk):
        output = target.forward(IDS[start : start + chunk], cache)
    whole_cache = target.new_cache()
    whole = target.forward(IDS, whole_cache)
    assert (output.logits - whole.logits).abs().max() <= 1e-4
    assert (output.features - whole.features).abs().max() <= 1e-4
    assert (cache.rows(0, len(IDS)) - whole_cache.rows(0, len(IDS))).abs().max() <= 1e-4


def test_only_the_rows_wanted_come_and_they_are_the_last(target: Target) -> None:
    whole = target.forward(IDS, target.new_cache(), num_logits=50, num_features=50)
    some = target.forward(IDS, target.new_cache(), num_logits=3, num_features=2)
    assert some.logits.shape == (3, target.vocab_size)
    assert some.features.shape == (2, len(target.layer_ids), target.hidden_size)
    assert (some.logits - whole.logits[-3:]).abs().max() <= 1e-4
    assert torch.equal(some.features, whole.features[-2:])


def test_features_do_not_hold_on_to_the_prompts_rows(llama: Target) -> None:
    features = llama.forward(IDS, llama.new_cache()).features
    assert features.untyped_storage().nbytes() == features.numel() * features.element_size()


def test_tapping_other_layers_gives_their_features() -> None:
    target = tiny_target("qwen3", num_hidden_layers=6)
    assert target.layer_ids == pivot_layer_ids(6, 5)
    with torch.inference_mode():
        expected = unmodified(target)(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    target.tap((5, 2))
    features = target.forward(IDS, target.new_cache(), num_features=4).features
    assert target.layer_ids == (5, 2)
    for index, layer in enumerate((5, 2)):
        assert (features[:, index] - expected[layer + 1][0, -4:]).abs().max() <= 1e-4


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_does_not_exist_cannot_be_tapped_and_the_taps_stay(layer: int) -> None:
    target = tiny_target()
    with pytest.raises(ConfigError, match=str(layer)):
        target.tap((0, layer))
    assert target.forward([1], target.new_cache()).features.shape[1] == len(target.layer_ids) == 4


def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was() -> None:
    target = tiny_target()
    cache = target.new_cache()
    target.forward(IDS[:10], cache)
    before = cache.rows(0, 10)

    def fail(*_: Any) -> None:
        raise MemoryError

    decoder: Any = target.model.get_decoder()
    handle = decoder.layers[2].register_forward_hook(fail)
    for broken in (cache, target.new_cache()):
        with pytest.raises(MemoryError):
            target.forward(IDS[10:13], broken)
    handle.remove()
    layers: list[Any] = list(cache.layers)
    assert {layer.get_seq_length() for layer in layers} == {10}
    assert torch.equal(cache.rows(0, 10), before)


def test_pivot_layers_are_the_published_ones() -> None:
    assert pivot_layer_ids(36, 7) == (0, 1, 9, 17, 26, 34, 35)
    assert pivot_layer_ids(6, 4) == (0, 1, 4, 5)
    assert pivot_layer_ids(28, 2) == (0, 27)
    assert pivot_layer_ids(29, 3) == (0, 14, 28)


def test_pivot_layers_are_distinct_ordered_and_reach_both_ends() -> None:
    for num_layers in range(2, 65):
        for num_features in range(2, num_layers + 1):
            ids = pivot_layer_ids(num_layers, num_features)
            assert len(ids) == num_features
            assert (ids[0], ids[-1]) == (0, num_layers - 1)
            assert list(ids) == sorted(set(ids))


@pytest.mark.parametrize(("num_layers", "num_features"), [(4, 1), (4, 5), (1, 1), (4, 0)])
def test_a_number_of_features_that_does_not_fit_is_refused(num_layers: int, num_features: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_features} feature layers of {num_layers}"):
        pivot_layer_ids(num_layers, num_features)


@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("gpt2", {}, "'gpt2'"),
        ("gemma2", {}, "'gemma2'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_was_not_shown_to_be_exact_is_refused(model_type: str, fields: dict[str, Any], match: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20, "head_dim": 8}
    config = AutoConfig.for_model(model_type, **small, intermediate_size=16, num_key_value_heads=2, **fields)
    with pytest.raises(UnsupportedModelError, match=match):
        Target(AutoModelForCausalLM.from_config(config), fingerprint="")


@pytest.mark.parametrize("options", [{"exact": True}, {"quantize": "int8"}])
def test_heads_whose_bits_depend_on_where_they_lie_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="heads of 10 elements"):
        tiny_target(head_dim=10, **options)
    assert tiny_target(head_dim=10).num_layers == 4


def test_no_mask_outlives_its_pass(llama: Target) -> None:
    caches = [llama.new_cache() for _ in range(3)]
    for num_rows in (3, 40):
        llama.forward_many([Segment([1] * num_rows, cache) for cache in caches])
        assert attention._grouped_mask.cache_info().currsize == attention._visible_keys.cache_info().currsize == 0


def test_a_loaded_folder_is_the_model_that_was_saved(model_folder: Path) -> None:
    loaded, made = Target.load(model_folder), tiny_target("qwen2")
    request = Request(IDS, max_new_tokens=10)
    texts = [
        [token for step in decode(t, TargetState(t.new_cache()), NullDrafter(), request) for token in step.tokens]
        for t in (loaded, made)
    ]
    assert texts[0] == texts[1]
    assert (loaded.vocab_size, loaded.hidden_size, loaded.num_layers, loaded.max_positions) == (160, 32, 4, 512)


def test_the_fingerprint_follows_weights_type_and_quantization(model_folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_folder)

    def fingerprint(folder: Path = model_folder, **kwargs: Any) -> str:
        facts: dict[str, Any] = {"dtype": torch.float32} | kwargs
        return fingerprint_of(folder, config, **facts)

    assert Target.load(model_folder).fingerprint == fingerprint()
    assert Target.load(model_folder, quantize="int8").fingerprint == fingerprint(quantize="int8")
    other = tmp_path / "other"
    unmodified(tiny_target("qwen2", seed=1)).save_pretrained(other)
    moved = shutil.copytree(model_folder, tmp_path / "moved")
    assert fingerprint(moved) == fingerprint()
    different = {fingerprint(), fingerprint(other), fingerprint(quantize="int8"), fingerprint(dtype=torch.bfloat16)}
    assert len(different) == 4


def test_a_remembered_digest_gives_way_when_the_file_changes(model_folder: Path, tmp_path: Path) -> None:
    config, digests = AutoConfig.from_pretrained(model_folder), tmp_path / "digests"

    def fingerprint() -> str:
        remembered = fingerprint_of(model_folder, config, dtype=torch.float32, digests_dir=digests)
        assert remembered == fingerprint_of(model_folder, config, dtype=torch.float32)
        return remembered

    first = fingerprint()
    assert fingerprint() == first
    (kept,) = digests.iterdir()
    kept.write_text("cut off")
    assert fingerprint() == first
    unmodified(tiny_target("qwen2", seed=1)).save_pretrained(model_folder)
    os.utime(model_folder / "model.safetensors", (1e9, 1e9))  # however coarse the file system's clock is
    assert fingerprint() != first


def test_a_damaged_folder_is_reported_as_such(model_folder: Path) -> None:
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptModelError, match="pull it again"):
        Target.load(model_folder)
    (model_folder / "config.json").write_text("{")
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        Target.load(model_folder)


def test_weights_that_no_fingerprint_covers_are_not_loaded(model_folder: Path) -> None:
    """Two models of pickled weights and one configuration would share their KV blocks."""
    torch.save(unmodified(tiny_target("qwen2")).state_dict(), model_folder / "pytorch_model.bin")
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(CorruptModelError):
        Target.load(model_folder)


@pytest.mark.parametrize("device", ["cuda:7", "nonsense"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=r"device .* expected cpu, cuda or mps"):
        Target.load(write_tiny_chat_model(tmp_path), device=device)
