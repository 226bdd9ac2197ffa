"""A checkpoint is loaded whole or refused by name: which field, what it is, what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlite_agent.drafters import checkpoint, loading
from dlite_agent.drafters.dlite import AGENT_V1, DLiteDrafter, DLiteModel
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.loading import load_drafter, trained_for
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import DrafterError, DrafterFormatError, DrafterMismatchError
from dlite_agent.testing import random_dlite, tiny_target, write_tiny_chat_model

LAYERS = 6
FEATURES = (0, 1, 4, 5)


def wide_target(**overrides: Any) -> Target:
    return tiny_target(**{"num_hidden_layers": LAYERS, **overrides})


@pytest.fixture(scope="module")
def model() -> DLiteModel:
    return random_dlite(wide_target(), group=2, target_layer_ids=FEATURES)


@pytest.fixture
def folder(model: DLiteModel, tmp_path: Path) -> Path:
    checkpoint.save(model, tmp_path / "drafter")
    return tmp_path / "drafter"


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def equal_weights(left: DLiteModel, right: DLiteModel) -> bool:
    return all(torch.equal(tensor, right.state_dict()[name]) for name, tensor in left.state_dict().items())


def test_what_was_saved_is_loaded(model: DLiteModel, folder: Path) -> None:
    loaded = checkpoint.load(folder)
    assert loaded.config == model.config
    assert equal_weights(loaded, model)


def test_the_files_have_the_published_names(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    names = {name.replace("layers.1.", "layers.0.") for name in load_file(folder / "model.safetensors")}
    layer = {f"self_attn.{p}_proj" for p in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{p}_proj" for p in ("gate", "up", "down")} | {"input_layernorm", "post_attention_layernorm"}
    head = {"prev_token_embedding.weight", "output_proj.weight"}
    head |= {f"{part}.{kind}" for part in ("state_proj", "state_hidden_mlp") for kind in ("weight", "bias")}
    assert names == {f"layers.0.{part}.weight" for part in layer} | {f"sequential_head.{part}" for part in head} | {
        "norm.weight",
        "context_norm.weight",
        "layer_depth_embedding.weight",
    }


def test_the_rope_base_is_read_from_either_place(folder: Path) -> None:
    def move(fields: dict[str, Any]) -> None:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
        del fields["rope_theta"]

    change_config(folder, move)
    assert checkpoint.load(folder).config.rope_theta == 5e5
    change_config(folder, lambda fields: fields.update(rope_theta=1e4, rope_parameters=None))
    assert checkpoint.load(folder).config.rope_theta == 1e4


def test_a_head_dim_that_is_not_given_is_the_width_of_a_head(tmp_path: Path) -> None:
    checkpoint.save(random_dlite(wide_target(), head_dim=8), tmp_path)
    change_config(tmp_path, lambda fields: fields.pop("head_dim"))
    assert checkpoint.load(tmp_path).config.head_dim == 8


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, None], ids=str)
def test_half_precision_storage_is_loaded_and_computed_in_either_type(
    model: DLiteModel, folder: Path, compute: torch.dtype | None
) -> None:
    change_tensors(folder, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    loaded = checkpoint.load(folder, dtype=compute)
    assert {parameter.dtype for parameter in loaded.parameters()} == {compute or torch.bfloat16}
    target = wide_target()
    target.tap(FEATURES)
    request = Request([1, 2, 3], max_new_tokens=8)
    steps = list(decode(target, TargetState(target.new_cache()), DLiteDrafter(loaded, target.embedding), request))
    assert max(step.num_proposed for step in steps) > 0
    plain = list(decode(target, TargetState(target.new_cache()), NullDrafter(), request))
    assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]


def shard(folder: Path) -> dict[str, str]:
    """Split the weights over two files; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{n}-of-00002.safetensors" for n in ("00001", "00002")]
    weight_map = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_are_put_together(model: DLiteModel, folder: Path) -> None:
    shard(folder)
    assert equal_weights(checkpoint.load(folder), model)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DrafterFormatError, match="model-00002-of-00002"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", 7, None, ["x"]], ids=str)
def test_an_index_that_leads_elsewhere_is_refused(folder: Path, name: object) -> None:
    weight_map: dict[str, object] = {**shard(folder), "norm.weight": name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DrafterFormatError, match="same folder"):
        checkpoint.load(folder)


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": 1}', "{"])
def test_a_damaged_index_is_refused(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(DrafterFormatError, match="index"):
        checkpoint.load(folder)


FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_target_layers",
    "block_size",
)
NESTED = ("anchor_group_size", "sequential_rank", "mask_token_id")


@pytest.mark.parametrize("value", [None, "32", 32.0, True, [32], -1], ids=str)
@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_field_is_named(folder: Path, field: str, value: object) -> None:
    change_config(folder, lambda fields: fields.update({field: value}))
    # A wrong count of target layers shows in the rule for feature layers.
    with pytest.raises(DrafterFormatError, match="feature layers" if (field, value) == (FIELDS[6], -1) else field):
        checkpoint.load(folder)


@pytest.mark.parametrize("field", [*FIELDS, "dlite_config", "rope_theta"])
def test_a_missing_field_is_named(folder: Path, field: str) -> None:
    change_config(folder, lambda fields: fields.pop(field))
    with pytest.raises(DrafterFormatError, match=field):
        checkpoint.load(folder)


@pytest.mark.parametrize("value", [None, "2", 2.0, True, -1], ids=str)
@pytest.mark.parametrize("field", NESTED)
def test_a_wrong_dlite_field_is_named(folder: Path, field: str, value: object) -> None:
    change_config(folder, lambda fields: fields["dlite_config"].update({field: value}))
    with pytest.raises(DrafterFormatError, match=field):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture_version", "dlite_v2"),
        ("architecture_version", None),
        ("model_role", "teacher"),
        ("sequential_head", "gru"),
        ("chs_num_layers", 5),
        ("target_layer_ids", [0, 2, 4, 5]),
        ("target_layer_ids", [5, 4, 1, 0]),
        ("target_layer_ids", ["0", "1", "4", "5"]),
    ],
    ids=str,
)
def test_another_version_role_or_choice_of_layers_is_named(folder: Path, field: str, value: object) -> None:
    change_config(folder, lambda fields: fields["dlite_config"].update({field: value}))
    got = re.escape(repr(tuple(value) if isinstance(value, list) else value))
    with pytest.raises(DrafterFormatError, match=f"dlite_config.{field} is {got}; expected"):
        checkpoint.load(folder)


@pytest.mark.parametrize("layers", [[], [0], list(range(7))], ids=len)
def test_a_number_of_layers_that_does_not_fit_is_refused(folder: Path, layers: list[int]) -> None:
    change_config(
        folder, lambda fields: fields["dlite_config"].update(target_layer_ids=layers, chs_num_layers=len(layers))
    )
    with pytest.raises(DrafterFormatError, match="feature layers of 6"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"head_dim": "16"}, "head_dim"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": -16}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads|head_dim"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"dlite_config": [1]}, "dlite_config"),
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_named(folder: Path, changes: dict[str, Any], match: str) -> None:
    change_config(folder, lambda fields: fields.update(changes))
    with pytest.raises(DrafterFormatError, match=match):
        checkpoint.load(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"dlite"', b"\xff\xfe"], ids=repr)
def test_a_configuration_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(DrafterFormatError, match=r"config\.json"):
        checkpoint.load(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(DrafterFormatError, match=file):
        checkpoint.load(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DrafterFormatError, match="fetch the checkpoint again"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.mlp.up_proj.weight", "sequential_head.state_proj.bias"])
def test_a_missing_misshapen_or_mistyped_tensor_is_named(folder: Path, name: str) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for change, match in (
        (lambda tensor: None, f"lacks the tensor {name}"),
        (lambda tensor: tensor[:-1].clone(), f"tensor {name} has shape"),
        (lambda tensor: tensor.unsqueeze(0).clone(), f"tensor {name} has shape"),
        (lambda tensor: tensor.to(torch.int32), f"tensor {name} has dtype"),
    ):
        (folder / "model.safetensors").write_bytes(whole)
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors.pop(name))
        save_file(tensors if changed is None else tensors | {name: changed}, folder / "model.safetensors")
        with pytest.raises(DrafterFormatError, match=match):
            checkpoint.load(folder)


def test_a_tensor_of_something_else_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(2)}))
    with pytest.raises(DrafterFormatError, match=r"embed_tokens\.weight"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("hidden_size", {"hidden_size": 64}),
        ("vocab_size", {"vocab_size": 200}),
        ("num_target_layers", {"num_hidden_layers": 5}),
    ],
)
def test_a_drafter_of_another_target_is_refused_and_changes_nothing(
    folder: Path, field: str, overrides: dict[str, int]
) -> None:
    target = wide_target(**overrides)
    before = target.layer_ids
    with pytest.raises(
        DrafterMismatchError, match=f"the drafter's {field} is .* and the target's {overrides.get(field, 5)}"
    ):
        load_drafter(str(folder), target)
    assert target.layer_ids == before


def test_loading_a_drafter_makes_the_target_take_the_features_it_reads(model: DLiteModel, folder: Path) -> None:
    target = wide_target()
    assert target.layer_ids != FEATURES
    alone = load_drafter(f"dlite:{folder}", target)
    assert isinstance(alone, DLiteDrafter)
    assert target.layer_ids == FEATURES
    assert equal_weights(alone.model, model)
    both = load_drafter(str(folder), target)
    assert isinstance(both, HybridDrafter)
    assert equal_weights(both.dlite.model, model)


@pytest.fixture
def agent_folder(tmp_path: Path) -> Path:
    fields: dict[str, Any] = {
        "version": AGENT_V1,
        "draft_vocab_size": 40,
        "has_confidence": True,
        "has_mask_embedding": True,
    }
    model = random_dlite(wide_target(), group=2, target_layer_ids=FEATURES, **fields)
    model.draft_to_target.copy_(torch.arange(40) * 4)
    checkpoint.save(model, tmp_path / "agent", dtype=torch.bfloat16)
    return tmp_path / "agent"


def test_our_version_is_saved_and_loaded(agent_folder: Path) -> None:
    loaded = checkpoint.load(agent_folder, dtype=torch.float32)
    assert loaded.config.version == AGENT_V1
    assert loaded.draft_to_target.tolist() == list(range(0, 160, 4))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    checkpoint.save(loaded, agent_folder.parent / "again")
    again = checkpoint.load(agent_folder.parent / "again")
    assert again.config == loaded.config
    assert equal_weights(again, loaded)
    names = set(load_file(agent_folder / "model.safetensors"))
    ours = {"draft_to_target", "mask_embedding", "sequential_head.prev_token_proj.weight"}
    ours |= {"sequential_head.confidence_proj.weight", "sequential_head.confidence_proj.bias"}
    assert ours < names
    assert "sequential_head.prev_token_embedding.weight" not in names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_vocab_size", None),
        ("draft_vocab_size", "40"),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", 161),
        ("draft_vocab_size", 41),
        ("confidence_head", None),
        ("confidence_head", 1),
        ("confidence_head", False),
        ("mask_embedding", "true"),
        ("mask_embedding", False),
        ("architecture_version", "dlite_v1"),
    ],
)
def test_a_wrong_field_of_our_version_is_named(agent_folder: Path, field: str, value: object) -> None:
    change_config(agent_folder, lambda fields: fields["dlite_config"].update({field: value}))
    with pytest.raises(DrafterFormatError, match=f"{field}|draft_to_target|confidence_proj|tensor|lacks"):
        checkpoint.load(agent_folder)


@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(40).flip(0).int(),
        torch.arange(40).int() - 1,
        torch.arange(40).int() + 121,
        torch.zeros(40).int(),
        torch.arange(40),
        torch.arange(40).float(),
        torch.arange(39).int(),
    ],
    ids=["descending", "negative", "too large", "repeated", "int64", "float", "too few"],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(agent_folder: Path, ids: torch.Tensor) -> None:
    change_tensors(agent_folder, lambda tensors: tensors.update(draft_to_target=ids))
    with pytest.raises(DrafterFormatError, match="draft_to_target"):
        checkpoint.load(agent_folder)


def test_a_drafter_that_was_trained_for_the_target_is_found(tmp_path: Path) -> None:
    target = Target.load(write_tiny_chat_model(tmp_path / "models" / "tiny-chat"))
    trained = tmp_path / "trained"
    other = random_dlite(wide_target())
    fitting = random_dlite(target, group=2)
    checkpoint.save(fitting, trained / "a", target_names=["someone/else"])
    checkpoint.save(other, trained / "b", target_names=["tiny-chat"])
    checkpoint.save(fitting, trained / "c")
    assert trained_for(target, folder=trained) is None
    checkpoint.save(fitting, trained / "d", target_names=["hub/tiny", "tiny-chat"])
    assert trained_for(target, folder=trained) == trained / "d"
    assert trained_for(target, folder=tmp_path / "nothing") is None
    change_config(trained / "d", lambda fields: fields["dlite_config"].update(target_names="tiny-chat"))
    with pytest.raises(DrafterFormatError, match="target_names"):
        trained_for(target, folder=trained)


def test_a_drafter_of_a_hub_model_is_found_by_its_id(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--tiny-chat" / "snapshots" / "0123abcd"
    target = Target.load(write_tiny_chat_model(cached))
    checkpoint.save(random_dlite(target), tmp_path / "trained" / "tiny", target_names=["org/tiny-chat"])
    assert trained_for(target, folder=tmp_path / "trained") == tmp_path / "trained" / "tiny"


def test_auto_is_lookup_and_the_trained_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.load(write_tiny_chat_model(tmp_path / "tiny-chat"))
    assert isinstance(load_drafter("auto", target), LookupDrafter)
    checkpoint.save(random_dlite(target), tmp_path / "trained" / "tiny", target_names=["tiny-chat"])
    monkeypatch.setattr(loading, "trained_for", partial(trained_for, folder=tmp_path / "trained"))
    auto = load_drafter("auto", target)
    assert isinstance(auto, HybridDrafter)


def test_drafters_are_known_by_name_and_unknown_ones_are_an_error(llama: Target, tmp_path: Path) -> None:
    assert isinstance(load_drafter("null", llama), NullDrafter)
    assert isinstance(load_drafter("lookup", llama), LookupDrafter)
    assert isinstance(load_drafter("auto", llama), LookupDrafter)
    for spec in ("eagle", "dlite:", f"dlite:{tmp_path}/none", str(tmp_path / "none")):
        with pytest.raises(DrafterError, match="expected"):
            load_drafter(spec, llama)
