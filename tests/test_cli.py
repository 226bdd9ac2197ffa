"""The command line: what is wrong is said in one line, with an exit code that scripts see."""

from __future__ import annotations

import io
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlite_agent import __version__
from dlite_agent.cli import main
from dlite_agent.drafters import checkpoint
from dlite_agent.runtime import close_all
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.testing import random_dlite, tiny_target, write_tiny_chat_model


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DLITE_OFFLINE", "1")
    monkeypatch.setenv("DLITE_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("REDIS_URL", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail; returns its one line."""
    capsys.readouterr()  # what making the model printed
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("dlite-agent: ")
    return line


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"dlite-agent {__version__}"


def test_models_are_listed_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m" in out
    assert "pull qwen2.5-coder-1.5b" in " ".join(out.split())


def test_doctor_looks_without_changing_anything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ("torch", "embedded server", "model smollm2-135m", "threads", "small-row products"):
        assert what in out
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("command", [["demo"], ["run"], ["pull"], ["bench", "verify"]])
def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    arguments = [*command, "nosuchmodel"] if command == ["pull"] else [*command, "--model", "nosuchmodel"]
    assert "nosuchmodel" in fails(capsys, *arguments)


def test_a_server_that_does_not_answer_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{taken.getsockname()[1]}")
    folder = write_tiny_chat_model(tmp_path / "model")
    line = fails(capsys, "run", "--model", str(folder))
    assert "StoreUnavailableError" in line


def test_a_drafter_for_another_target_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    checkpoint.save(random_dlite(tiny_target("llama", hidden_size=48)), tmp_path / "drafter")
    line = fails(capsys, "run", "--model", str(folder), "--drafter", str(tmp_path / "drafter"))
    assert "DrafterMismatchError" in line
    assert "hidden_size is 48" in line


def test_an_unknown_drafter_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    assert "nosuch" in fails(capsys, "run", "--model", str(folder), "--drafter", "nosuch")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A checkpoint with recordings of its own outputs."""
    target = tiny_target("llama")
    model = random_dlite(target, group=2)
    folder = tmp_path / "golden"
    checkpoint.save(model, folder)
    pivot = torch.randn(1, len(target.layer_ids), target.hidden_size)
    anchors = torch.tensor([[3, 5]])
    with torch.inference_mode():
        hidden = model.hidden(pivot, anchors, target.embedding)
        drafts, logits = model.greedy(pivot, anchors, target.embedding, num_tokens=7)
        recorded = {
            "pivot_hidden": pivot,
            "anchor_token": anchors[:, 1],
            "predecessor_token": anchors[:, 0],
            "target_embedding": target.embedding,
            "draft_hidden": hidden,
            "forced_tokens": drafts[0],
            "forced_logits": model.forced(hidden, anchors, drafts, target.embedding)[0],
            "greedy_logits": logits[0],
            "greedy_drafts": drafts[0],
        }
    save_file({name: tensor.clone().contiguous() for name, tensor in recorded.items()}, folder / "io.safetensors")
    return folder


def test_a_drafter_that_gives_what_was_recorded_passes(capsys: pytest.CaptureFixture[str], golden: Path) -> None:
    assert main(["drafter", "check", str(golden)]) == 0
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize("tensor", ["draft_hidden", "forced_logits", "greedy_logits", "greedy_drafts"])
def test_a_drafter_that_gives_something_else_fails(
    capsys: pytest.CaptureFixture[str], golden: Path, tensor: str
) -> None:
    recorded = load_file(golden / "io.safetensors")
    recorded[tensor].view(-1)[0] += 1
    save_file(recorded, golden / "io.safetensors")
    assert main(["drafter", "check", str(golden)]) == 1
    assert "failed" in capsys.readouterr().out


def test_a_truncated_checkpoint_is_said(capsys: pytest.CaptureFixture[str], golden: Path) -> None:
    weights = golden / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "DrafterFormatError" in fails(capsys, "drafter", "check", str(golden))


def test_a_folder_without_a_checkpoint_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in fails(capsys, "drafter", "check", str(tmp_path))


def test_the_golden_vectors_are_reproduced(capsys: pytest.CaptureFixture[str], golden_vectors: Path) -> None:
    for group in ("group1", "group2"):
        assert main(["drafter", "check", str(golden_vectors / group)]) == 0
    assert capsys.readouterr().out.count("passed") == 2


def test_the_cost_table_ends_in_a_json_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    assert main(["bench", "verify", "--model", str(folder), "--context", "8", "--repeats", "1"]) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["bench"] == "verify"
    assert {"ours_4_over_1", "stock_4_over_1"} <= line["figures"].keys()


def test_a_model_without_a_chat_template_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert "chat template" in fails(capsys, "run", "--model", str(folder))


def test_damaged_weights_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "CorruptModelError" in fails(capsys, "bench", "verify", "--model", str(folder))


def test_weights_that_the_config_asks_for_must_be_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    assert "lacks weights" in fails(capsys, "bench", "verify", "--model", str(folder))


@pytest.mark.parametrize("text", ["[1]", "{", '{"model_type": "llama", "num_hidden_layers": "x"}'])
def test_a_damaged_model_config_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    (folder / "config.json").write_text(text)
    fails(capsys, "bench", "verify", "--model", str(folder))


def test_a_workspace_that_is_not_there_is_not_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "workspace" in fails(capsys, "run", "--workspace", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "x" * 1000])
def test_a_thread_that_cannot_be_named_so_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "ConfigError: the thread is named" in fails(capsys, "run", "--thread", name)


def test_a_script_reads_what_is_fatal_as_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "--model", "nosuchmodel"]) == 1
    captured = capsys.readouterr()
    event = json.loads(captured.out)
    assert (event["event"], event["kind"], event["is_fatal"]) == ("error", "UnknownModelError", True)
    assert "nosuchmodel" in captured.err


def test_a_thread_is_resumed_from_the_store_and_forked_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: EmbeddedServer
) -> None:
    monkeypatch.setenv("REDIS_URL", f"unix://{server.state.socket}")
    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=16384)
    arguments = ["run", "--json", "--model", str(folder), "--workspace", str(tmp_path), "--max-tokens", "5"]

    def run(thread: str, *lines: str) -> dict[str, dict[str, Any]]:
        capsys.readouterr()
        close_all()  # what the next run reuses comes from the store
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        assert main([*arguments, "--thread", thread]) == 0
        return {event["event"]: event for event in map(json.loads, capsys.readouterr().out.splitlines())}

    first = run("one", "hi", "/stats")
    assert first["stats"]["in_all"] == first["stats"]["last_turn"] == first["turn_end"]["stats"]
    assert "resumed" not in first
    rows = first["call"]["input_tokens"] + 4  # of the last token there is none
    second = run("one", "/fork two", "more")
    assert (second["start"]["num_turns"], second["start"]["stored_tokens"]) == (1, rows)
    assert second["forked"]["num_tokens"] == rows + 1
    assert second["turn_end"]["stats"]["restored"] == rows
    third = run("two", "and more", "/sessions")
    assert third["resumed"]["computed_again"] == 0
    assert third["resumed"]["restored"] == third["turn_end"]["stats"]["restored"] > rows
    assert {session["thread"] for session in third["sessions"]["sessions"]} == {"one", "two"}


@pytest.mark.parametrize("value", ["true", "yes", " 1"])
def test_a_wish_for_exactness_that_is_not_understood_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DLITE_EXACT", value)
    assert "DLITE_EXACT" in fails(capsys, "doctor")


def test_a_dtype_that_there_is_not_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_DTYPE", "bf16")
    assert "bfloat16" in fails(capsys, "doctor")


def test_a_durability_that_there_is_not_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLITE_DURABILITY", "later")
    assert "turn, async, none" in fails(capsys, "doctor")


@pytest.mark.parametrize("value", ["abc", "0", "100000"])
def test_a_thread_count_that_cannot_work_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DLITE_THREADS", value)
    assert "threads" in fails(capsys, "doctor").lower()


def test_a_message_that_cannot_be_answered_does_not_stay_in_the_thread(
    capsys: pytest.CaptureFixture[str], type_lines: Callable[..., None], tmp_path: Path
) -> None:
    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=16384)
    type_lines("x" * 20000, "hi")
    arguments = ["run", "--model", str(folder), "--workspace", str(tmp_path), "--max-tokens", "5"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "PromptTooLongError" in out
    assert "5 generated" in out
    assert "resume with: dlite-agent run --thread default" in out


def test_a_replay_of_nothing_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "nothing.jsonl"
    assert "nothing.jsonl" in fails(capsys, "demo", "--replay", str(missing))
    missing.write_text("{}\n")
    assert "nothing.jsonl:1" in fails(capsys, "demo", "--replay", str(missing))
    shutil.rmtree(tmp_path)
