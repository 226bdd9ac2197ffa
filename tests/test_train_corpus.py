"""A corpus holds the target's own answers and what it computed for them; a kill loses nothing that was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlite_agent.config import Settings
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.pivot import pivot_layer_ids
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError
from dlite_agent.runtime import close_all, shared_runtime
from dlite_agent.testing import write_tiny_chat_model
from dlite_agent.train.contexts import NO_PARENT, Context, ContextReader, FeatureLog, write_contexts
from dlite_agent.train.corpus import Author, CorpusBuilder, Progress, about, prompt_key
from dlite_agent.train.options import CorpusOptions
from dlite_agent.train.recordings import training_sessions
from dlite_agent.train.shards import Answer, CorpusWriter, context_paths, read_manifest, read_shard, shard_paths

OPTIONS = CorpusOptions(num_samples=2, temperature=1.0, max_tokens=12, max_prompt=300)


def never(progress: Progress) -> bool:
    return False


def agent_record(name: str, group: str, *, number: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"Question {number}: how many?"},
        {"role": "assistant", "content": f"It is {number}, says the record."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    return {"id": name, "group": group, "system": "Count well, and be brief about it, please.", "messages": messages}


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tasks in two variants, of which the last is measured; two open questions, one with a second turn."""
    folder = tmp_path_factory.mktemp("workloads")
    records = [agent_record(f"count/{v}/{n}", f"count/{n}", number=n) for n in range(8) for v in ("a", "b")]
    general = [
        {"id": "open/0", "turns": ["Say something."]},
        {"id": "open/1", "turns": ["Say more.", "And now less."]},
    ]
    for name, lines in (("agent/count.jsonl", records), ("general/general.jsonl", general)):
        path = folder / name
        path.parent.mkdir()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "subsets.json").write_text(json.dumps({"measured": ["count/a/7"]}))
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def author(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), threads=1)
    runtime = shared_runtime(str(model_folder), drafter="null", quantize=None, store=None, settings=settings)
    runtime.target.tap(pivot_layer_ids(runtime.target.num_layers, 3))
    yield Author(runtime.target, runtime.encoder, runtime.render, runtime.end_ids)
    close_all()


def build(
    author: Author,
    workloads: Path,
    out: Path,
    *,
    should_stop: Any = never,
    options: CorpusOptions = OPTIONS,
    **changes: Any,
) -> list[Answer]:
    shard_bytes = changes.pop("shard_bytes", 4000)
    sessions = training_sessions(workloads, is_held_out=changes.pop("is_held_out", False), seed=options.seed)
    writer = CorpusWriter(out, about(author, options, model="tiny"), shard_bytes=shard_bytes)
    CorpusBuilder(author, options, writer, **changes).build(sessions, should_stop=should_stop)
    writer.close()
    return answers_in(out)


def answers_in(folder: Path) -> list[Answer]:
    shards = [read_shard(path) for path in shard_paths(folder)]
    return [shard.answer(index) for shard in shards for index in range(len(shard))]


def keys(answers: list[Answer]) -> set[tuple[int, tuple[int, ...]]]:
    return {(answer.prompt_key, tuple(answer.tokens.tolist())) for answer in answers}


@pytest.fixture(scope="module")
def whole(author: Author, workloads: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return build(author, workloads, tmp_path_factory.mktemp("corpus"))


def prompts(author: Author, workloads: Path) -> dict[int, list[int]]:
    """The prompts of the agent sessions by key."""
    found = {}
    for session in training_sessions(workloads):
        for turn in session.turns:
            if None not in turn.messages:
                ids = author.encoder.encode(author.render([m for m in turn.messages if m is not None], turn.tools))
                found[prompt_key(ids)] = ids
    return found


def fresh_rows(target: Target, prompt: list[int], answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of the row before each token of an answer, computed from nothing."""
    ids = [*prompt, *answer.tokens.tolist()[:-1]]
    count = len(answer.tokens)
    output = target.forward(ids, target.new_cache(), num_logits=count, num_features=count)
    return output.logits, output.features


def test_labels_and_features_are_those_of_a_fresh_pass(author: Author, workloads: Path, whole: list[Answer]) -> None:
    known = prompts(author, workloads)
    compared = [answer for answer in whole if answer.prompt_key in known]
    assert len(compared) > 20
    for answer in compared:
        logits, features = fresh_rows(author.target, known[answer.prompt_key], answer)
        assert answer.labels.tolist() == logits.argmax(dim=-1).tolist()
        assert torch.allclose(answer.features.float(), features, rtol=2**-7, atol=1e-3)
        log_p = torch.log_softmax(logits, dim=-1)
        top = log_p.gather(-1, answer.top_ids.long())
        assert torch.allclose(answer.top_logprobs.float(), top, atol=5e-3)
        assert torch.allclose(top, log_p.topk(top.shape[-1]).values, atol=1e-4)
        assert answer.prompt_tail == known[answer.prompt_key][-1]
        assert answer.num_prompt == len(known[answer.prompt_key])


@pytest.mark.parametrize("num_passes", [10_000, 60])
def test_contexts_are_the_rows_of_a_fresh_pass_over_whole_prompts(
    author: Author, workloads: Path, whole: list[Answer], tmp_path: Path, num_passes: int
) -> None:
    options = replace(OPTIONS, keeps_contexts=True)
    found: list[Answer] = []
    while keys(found) != keys(whole):  # a run of few passes is stopped again and again
        found = build(
            author,
            workloads,
            tmp_path,
            options=options,
            concurrency=3,
            should_stop=lambda p: p.num_passes >= num_passes,
        )
    reader = ContextReader(context_paths(tmp_path))
    assert all(answer.prompt_key in reader for answer in whole)
    known = {key: ids for key, ids in prompts(author, workloads).items() if key in reader}
    assert len(known) > 10
    for key, ids in known.items():
        assert reader.length(key) == len(ids)
        assert reader.ids(key).tolist() == ids
        expected = author.target.forward(ids, author.target.new_cache(), num_features=len(ids)).features
        for start in (0, 1, len(ids) // 2, len(ids) - 1):
            rows = reader.features(key, start)
            assert rows.dtype == torch.bfloat16
            assert torch.allclose(rows.float(), expected[start:], rtol=2**-7, atol=1e-3)
    num_stored = sum(len(load_file(path)["features"]) for path in context_paths(tmp_path))
    assert num_stored < sum(map(len, known.values())) * (0.5 if num_passes == 10_000 else 1.0)  # shared rows once


def test_a_damaged_context_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "context-00000.safetensors"
    write_contexts(
        path, [Context(7, NO_PARENT, 0, torch.ones(3, dtype=torch.int32), torch.ones(3, 2, 4, dtype=torch.bfloat16))]
    )
    reader = ContextReader([path])
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match="build the corpus again"):
        reader.ids(7)
    with pytest.raises(ConfigError, match="build the corpus again"):
        ContextReader([path])


def test_a_feature_log_follows_its_state(tmp_path: Path) -> None:
    log, rows = FeatureLog(), torch.arange(10.0).view(10, 1, 1)
    log.write(0, rows[:4])
    log.write(4, rows[4:6])
    log.write(3, rows[7:9])
    assert torch.cat(log.read(0, 5)).flatten().tolist() == [0, 1, 2, 7, 8]
    assert torch.cat(log.read(2, 4)).flatten().tolist() == [2, 7]
    other = FeatureLog()
    other.copy_from(log, 4)
    log.write(0, rows[9:])
    assert torch.cat(other.read(0, 4)).flatten().tolist() == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="1 rows; expected at least 3"):
        log.write(3, rows)


def test_every_prompt_is_answered_once_greedily_and_by_samples(
    author: Author, workloads: Path, whole: list[Answer]
) -> None:
    by_prompt: dict[int, list[Answer]] = {}
    for answer in whole:
        by_prompt.setdefault(answer.prompt_key, []).append(answer)
    assert set(prompts(author, workloads)) < set(by_prompt)
    assert len(by_prompt) == 7 * 2 + 3  # both variants of a task have the same prompts
    for answers in by_prompt.values():
        samples = [answer.sample for answer in answers]
        assert samples[0] == 0 and set(samples) <= {0, 1, 2} and len(set(samples)) == len(samples)
        assert answers[0].tokens.tolist() == answers[0].labels.tolist()
        assert len(keys(answers)) == len(answers)
    assert max(map(len, by_prompt.values())) == 3
    assert any(answer.tokens.tolist() != answer.labels.tolist() for answer in whole)


def test_a_second_turn_without_a_record_follows_the_targets_own_reply(author: Author, whole: list[Answer]) -> None:
    first, second = (
        next(a for a in whole if a.session_id == "open/1" and a.turn == turn and a.is_greedy) for turn in (0, 1)
    )
    assert second.num_prompt > first.num_prompt + len(first.tokens)


def test_no_held_out_group_is_inside_and_the_others_are_in_the_held_out_corpus(
    author: Author, workloads: Path, whole: list[Answer], tmp_path: Path
) -> None:
    inside = {answer.session_id for answer in whole}
    assert not inside & {"count/a/7", "count/b/7"}
    held_out = {answer.session_id for answer in build(author, workloads, tmp_path, is_held_out=True)}
    assert held_out and held_out <= {"count/a/7", "count/b/7"}


def test_how_it_is_decoded_changes_no_token(
    author: Author, workloads: Path, whole: list[Answer], tmp_path: Path
) -> None:
    alone = build(author, workloads, tmp_path / "alone", concurrency=1)
    drafted = build(author, workloads, tmp_path / "drafted", concurrency=5, drafter=LookupDrafter(min_match=1))
    assert keys(alone) == keys(drafted) == keys(whole)
    rows = {(a.prompt_key, tuple(a.tokens.tolist())): a.features for a in whole}
    for answer in drafted:
        expected = rows[answer.prompt_key, tuple(answer.tokens.tolist())]
        assert torch.allclose(answer.features.float(), expected.float(), rtol=2**-6, atol=1e-3)


def test_a_stopped_run_goes_on_where_it_was(
    author: Author, workloads: Path, whole: list[Answer], tmp_path: Path
) -> None:
    num_runs = 0
    done: set[tuple[int, tuple[int, ...]]] = set()
    while keys(whole) != done:
        found = build(author, workloads, tmp_path, should_stop=lambda progress: progress.num_passes >= 60)
        assert len(keys(found)) == len(found) > len(done)
        done = keys(found)
        num_runs += 1
    assert num_runs > 2


def test_a_killed_process_loses_only_what_no_shard_holds(
    model_folder: Path, workloads: Path, whole: list[Answer], tmp_path: Path
) -> None:
    out = tmp_path / "corpus"
    options = ["--samples", "2", "--temperature", "1.0", "--max-tokens", "12", "--max-prompt", "300", "--features", "3"]
    options += ["--shard-mb", "0.004", "--concurrency", "2"]
    command = [sys.executable, "-m", "dlite_agent.cli", "corpus", "--target", str(model_folder), "--out", str(out)]
    command += ["--workloads", str(workloads), "--quantize", "none", *options]
    environment = {**os.environ, "DLITE_HOME": str(tmp_path / "home"), "DLITE_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while len(read_manifest(out)) < 2 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = keys(answers_in(out))
    assert before < keys(whole)
    (out / "shard-99999.partial").write_bytes(b"cut off")
    with (out / "manifest.jsonl").open("a") as manifest:
        manifest.write('{"file": "shard-0')  # what a kill may leave
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert keys(answers_in(out)) == keys(whole)
    assert len(answers_in(out)) == len(whole)
    counts = json.loads((out / "corpus.json").read_text())["counts"]
    assert counts["num_answers"] == len(whole)


def test_the_same_answer_to_a_prompt_is_kept_once_also_after_a_restart(
    author: Author, whole: list[Answer], tmp_path: Path
) -> None:
    facts, one = about(author, OPTIONS, model="tiny"), whole[0]
    writer = CorpusWriter(tmp_path, facts)
    assert writer.add(one)
    assert not writer.add(replace(one, sample=1))
    assert writer.add(replace(one, prompt_key=one.prompt_key + 1))
    writer.close()
    writer = CorpusWriter(tmp_path, facts)
    assert not writer.add(replace(one, sample=2))
    writer.close()
    assert len(answers_in(tmp_path)) == 2


def test_other_options_or_a_second_writer_are_refused(author: Author, tmp_path: Path) -> None:
    facts = about(author, OPTIONS, model="tiny")
    writer = CorpusWriter(tmp_path, facts)
    with pytest.raises(ConfigError, match="another process"):
        CorpusWriter(tmp_path, facts)
    writer.close()
    with pytest.raises(ConfigError, match="model 'tiny', asked for was 'huge'"):
        CorpusWriter(tmp_path, {**facts, "model": "huge"})
    CorpusWriter(tmp_path, facts).close()
