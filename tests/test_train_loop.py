"""Training learns, can be interrupted anywhere without a trace, and leaves a drafter that loads and drafts."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlite_agent.cli import main
from dlite_agent.config import Settings
from dlite_agent.drafters.dlite import DLiteConfig, DLiteDrafter
from dlite_agent.drafters.dspark import DSparkDrafter
from dlite_agent.drafters.independent import IndependentDrafter
from dlite_agent.drafters.loading import load_drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode, run_pass
from dlite_agent.engine.draft_length import FixedLength
from dlite_agent.engine.request import Request
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError
from dlite_agent.testing import write_tiny_chat_model
from dlite_agent.train.anchors import AnchorStream, AnchorTable, Batch, Position, frequent_tokens
from dlite_agent.train.config import TrainConfig
from dlite_agent.train.contexts import NO_PARENT, Context, ContextReader, FeatureLog
from dlite_agent.train.corpus import RecordedDecoding
from dlite_agent.train.evaluate import _Tally, held_out_tau
from dlite_agent.train.loop import Trainer, learning_rate
from dlite_agent.train.options import CorpusOptions, Plan, RunOptions
from dlite_agent.train.setup import prepare
from dlite_agent.train.shards import Answer, CorpusWriter, context_paths, read_shard, shard_paths
from dlite_agent.train.students import DLiteStudent, DSparkStudent, IndependentStudent, Student
from dlite_agent.train.teacher import Teacher, divergence, teacher_weight, window_rows

SETTINGS = (
    "num_layers=1",
    "num_heads=2",
    "num_kv_heads=2",
    "head_dim=16",
    "intermediate_size=64",
    "rank=32",
    "draft_vocab_size=128",
    "batch_size=32",
    "learning_rate=0.005",
    "num_resident=2",
)
NUM_PROMPTS, NUM_TOKENS = 12, 20


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(model_folder: Path) -> Target:
    return Target.load(model_folder)


def prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (6,), generator=generator).tolist()


def answer(target: Target, number: int, sample: int) -> tuple[Answer, Context]:
    state, log = TargetState(target.new_cache()), FeatureLog()
    sampling = SamplingParams(1.0, seed=number) if sample else SamplingParams()
    request = Request(prompt(number), sampling=sampling, max_new_tokens=NUM_TOKENS)
    decoding = RecordedDecoding(target, state, NullDrafter(), request)
    decoding.on_rows = log.write
    while not decoding.is_done:
        run_pass(target, [decoding], FixedLength())
    facts = {"prompt_key": number, "session_id": "s", "turn": 0, "num_prompt": 6, "prompt_tail": prompt(number)[-1]}
    ids = torch.tensor(prompt(number), dtype=torch.int32)
    context = Context(number, NO_PARENT, 0, ids, torch.cat(log.read(0, len(ids))))
    return decoding.answer(**facts, sample=sample), context


def facts_of(target: Target, *, is_held_out: bool) -> dict[str, Any]:
    return {
        "model": "tiny",
        "target_fingerprint": target.fingerprint,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "feature_layer_ids": list(target.layer_ids),
        "options": asdict(CorpusOptions(is_held_out=is_held_out)),
    }


def write_corpus(target: Target, folder: Path, *, is_held_out: bool) -> Path:
    facts = facts_of(target, is_held_out=is_held_out)
    writer = CorpusWriter(folder, facts, shard_bytes=30_000)
    for number in range(NUM_PROMPTS):
        for sample in (0, 1):
            given, context = answer(target, number, sample)
            if not sample:
                writer.add_context(context)
            writer.add(given)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(target, tmp_path_factory.mktemp("corpus"), is_held_out=False)


@pytest.fixture(scope="module")
def same_held_out(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same answers once more, as a held-out corpus: what overfitting must reach."""
    return write_corpus(target, tmp_path_factory.mktemp("held"), is_held_out=True)


def trainer(model_folder: Path, corpus: Path, out: Path, *settings: str, **options: Any) -> Trainer:
    run = RunOptions(str(model_folder), corpus, out, settings=(*SETTINGS, *settings), **{"epochs": 2.0, **options})
    return prepare(run, Settings(threads=1))


def weights(out: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in out.student.model.state_dict().values()]


def log_of(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def student_of(drafter: DLiteDrafter | DSparkDrafter | IndependentDrafter, target: Target) -> Student:
    if isinstance(drafter, DLiteDrafter):
        return DLiteStudent(drafter.model, target.embedding)
    if isinstance(drafter, DSparkDrafter):
        return DSparkStudent(drafter.model, target.embedding, target.head)
    return IndependentStudent(drafter.model, target.embedding, target.head)


def silent(line: str) -> None:
    """Say nothing."""


def test_a_batch_holds_what_the_answers_hold(corpus: Path) -> None:
    shard = read_shard(shard_paths(corpus)[0])
    table = AnchorTable([shard, shard])
    starts, counts = table.places()
    assert len(table) == sum(counts) == 2 * sum(len(shard.answer(i).tokens) - 1 for i in range(len(shard)))
    for index in (1, len(shard) + 1):
        expected = shard.answer(1)
        for place in (0, 1, NUM_TOKENS - 3):
            batch = table.gather(torch.tensor([starts[index] + place]), num_drafts=4)
            before = expected.tokens[place - 1] if place else expected.prompt_tail
            assert batch.anchors.tolist() == [[int(before), int(expected.tokens[place])]]
            assert torch.equal(batch.pivot[0], expected.features[place].float())
            there = min(4, NUM_TOKENS - 1 - place)
            assert batch.is_there.tolist() == [[k < there for k in range(4)]]
            behind = slice(place + 1, place + 1 + there)
            assert batch.tokens[0, :there].tolist() == expected.tokens[behind].tolist()
            assert batch.labels[0, :there].tolist() == expected.labels[behind].tolist()
            assert torch.equal(batch.top_ids[0, :there].int(), expected.top_ids[behind])
            assert torch.equal(batch.top_logprobs[0, :there], expected.top_logprobs[behind].float())


def test_an_epoch_has_every_anchor_once_and_the_next_another_order(corpus: Path) -> None:
    paths = shard_paths(corpus)
    assert len(paths) > 3
    stream = AnchorStream(paths, batch_size=7, num_drafts=3, num_resident=2, seed=0)
    position = Position()
    epochs: list[list[float]] = [[], [], []]
    for batch in stream.batches(position):
        if position.epoch == 3:
            break
        epochs[position.epoch] += batch.pivot.sum(dim=(1, 2)).tolist()
    tables = [AnchorTable([read_shard(path)]) for path in paths]
    every = [table.gather(torch.arange(len(table)), num_drafts=3).pivot.sum(dim=(1, 2)) for table in tables]
    assert all(sorted(epoch) == sorted(torch.cat(every).tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_stream_goes_on_at_any_position(corpus: Path) -> None:
    stream = AnchorStream(shard_paths(corpus), batch_size=7, num_drafts=3, num_resident=2, seed=3)
    position, passed = Position(), []
    for batch, _ in zip(stream.batches(position), range(90), strict=False):
        passed.append((replace(position), batch.pivot))
    assert passed[-1][0].epoch > 0
    for index in (0, 10, 40, 88):
        again = next(stream.batches(replace(passed[index][0])))
        assert torch.equal(again.pivot, passed[index + 1][1])


def test_the_draft_vocabulary_is_the_most_frequent_tokens_in_ascending_order(corpus: Path) -> None:
    counts = torch.zeros(258)
    for path in shard_paths(corpus):
        for name in ("tokens", "labels"):
            counts += torch.bincount(read_shard(path).rows[name].long(), minlength=258)
    chosen = frequent_tokens(shard_paths(corpus), count=20, vocab_size=258).tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) == 20
    assert counts[chosen].min() >= counts[[t for t in range(258) if t not in chosen]].max()
    used = int((counts > 0).sum())
    filled = frequent_tokens(shard_paths(corpus), count=used + 5, vocab_size=258).tolist()
    assert [t for t in filled if counts[t] == 0] == [t for t in range(258) if counts[t] == 0][:5]


@pytest.mark.parametrize(("kind", "epochs"), [("dlite", 160.0), ("dspark", 80.0), ("independent", 80.0)])
def test_training_overfits_what_it_sees_and_the_drafter_it_leaves_drafts_that(
    model_folder: Path, target: Target, corpus: Path, same_held_out: Path, tmp_path: Path, kind: str, epochs: float
) -> None:
    run = trainer(
        model_folder, corpus, tmp_path, f"kind={kind}", epochs=epochs, held_out=same_held_out, report_every=100
    )
    tau = partial(held_out_tau, paths=shard_paths(same_held_out), reader=run.held_out_reader)
    assert (run.held_out_reader is None) == (kind == "dlite")
    before = tau(run.student)
    run.run(say=silent)
    after = tau(run.student)
    assert before.tau < 1.3
    assert after.tau > 3.0
    rows = log_of(tmp_path)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) / 2
    assert float(rows[-1]["accuracy_1"]) > 0.5
    drafter = load_drafter(f"dlite:{tmp_path}", target)
    assert isinstance(drafter, DLiteDrafter | DSparkDrafter | IndependentDrafter)
    assert drafter.name == kind
    assert {p.dtype for p in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16, torch.int32}
    num_tokens = num_passes = 0
    for number in range(NUM_PROMPTS):
        request = Request(prompt(number), max_new_tokens=NUM_TOKENS)
        steps = list(decode(target, TargetState(target.new_cache()), drafter, request))
        plain = list(decode(target, TargetState(target.new_cache()), NullDrafter(), request))
        assert [t for s in steps for t in s.tokens] == [t for s in plain for t in s.tokens]
        num_tokens += sum(len(step.tokens) for step in steps[1:])
        num_passes += len(steps) - 1
    # The replay is what decoding does; near-ties of two ways to multiply aside.
    replayed = tau(student_of(drafter, target))
    assert replayed.tau > 2.5
    assert num_tokens / num_passes == pytest.approx(replayed.tau, rel=0.02)


@pytest.mark.parametrize("kind", ["dlite", "dspark", "independent"])
def test_half_precision_is_of_the_products_alone(model_folder: Path, corpus: Path, tmp_path: Path, kind: str) -> None:
    runs = [
        trainer(model_folder, corpus, tmp_path / precision, f"kind={kind}", f"precision={precision}", report_every=10)
        for precision in ("auto", "float32", "bfloat16")
    ]
    for run in runs:
        run.run(say=silent)
    plain, whole, half = (weights(run) for run in runs)
    assert all(torch.equal(a, b) for a, b in zip(plain, whole, strict=True))  # a CPU is not told to round
    assert all(parameter.dtype == torch.float32 for parameter in runs[2].student.model.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(half, whole, strict=True))
    losses = [float(log_of(tmp_path / name)[-1]["loss"]) for name in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_noise_is_as_large_as_asked_for_of_each_row_and_touches_nothing_else(target: Target, corpus: Path) -> None:
    reader = ContextReader(context_paths(corpus))
    table = AnchorTable([read_shard(shard_paths(corpus)[0])])
    batch = table.gather_answers([0, 1, 2], num_drafts=4, reader=reader)
    blurred = batch.blurred(0.25, torch.Generator().manual_seed(0))
    assert batch.blurred(0.0, torch.Generator()) is batch
    again = batch.blurred(0.25, torch.Generator().manual_seed(0))
    assert torch.equal(blurred.pivot, again.pivot)
    pairs = [(batch.pivot, blurred.pivot)]
    pairs += [(before.features, after.features) for before, after in zip(batch.texts, blurred.texts, strict=True)]
    for before, after in pairs:
        assert after.dtype == before.dtype
        rms = [rows.float().square().mean(dim=-1).sqrt() for rows in (after.float() - before.float(), before)]
        assert (rms[0] / rms[1]).mean().item() == pytest.approx(0.25, rel=0.1)
    assert torch.equal(blurred.labels, batch.labels)
    assert torch.equal(blurred.anchors, batch.anchors)


def test_a_replay_steps_as_decoding_does() -> None:
    tally = _Tally(3)
    rows = [[True, False, True], [True, True, True], [False, True, True], [True, True, False], [True, False, False]]
    tally.walk([*rows, [True, False, False]])  # six places, so six tokens behind the first
    # place 0: one accepted and a bonus; place 2: none, a bonus; place 3: two and a bonus
    result = tally.sum_up()
    assert (result.num_steps, result.tau) == (3, 2.0)
    assert result.accepted_at == (2 / 3, 1 / 2, 0.0)
    tally.walk([[True, True, True], [True, True, False]])  # all that is there, no bonus behind the end
    assert tally.sum_up().tau == 8 / 4


@pytest.mark.parametrize(
    "settings",
    [("kind=dlite",), ("kind=dspark",), ("kind=independent",), ("feature_noise=0.2", "precision=bfloat16")],
    ids=" ".join,
)
def test_a_run_stopped_and_resumed_has_the_weights_of_one_that_was_not(
    model_folder: Path, corpus: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    whole = trainer(model_folder, corpus, tmp_path / "whole", *settings, report_every=7)
    whole.run(say=silent)
    stops = iter([False] * 11 + [True])
    first = trainer(model_folder, corpus, tmp_path / "parts", *settings, report_every=7)
    first.run(should_stop=lambda: next(stops), say=silent)
    assert 0 < first.step < whole.step
    second = trainer(model_folder, corpus, tmp_path / "parts", *settings, report_every=7, is_resumed=True)
    assert second.step == first.step
    second.run(say=silent)
    assert second.step == whole.step
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(second), strict=True))
    whole_losses, part_losses = (
        [(row["step"], row["loss"]) for row in log_of(tmp_path / name)] for name in ("whole", "parts")
    )
    assert len(whole_losses) > 2
    assert part_losses == whole_losses


def test_a_killed_run_resumes_to_the_same_weights(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    whole = trainer(model_folder, corpus, tmp_path / "whole", epochs=20.0)
    whole.run(say=silent)
    out = tmp_path / "killed"
    options = [option for setting in SETTINGS for option in ("--config", setting)]
    command = [sys.executable, "-m", "dlite_agent.cli", "train", "--target", str(model_folder), "--corpus", str(corpus)]
    command += ["--out", str(out), "--epochs", "20", "--checkpoint-seconds", "0", *options]
    environment = {**os.environ, "DLITE_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not (out / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = trainer(model_folder, corpus, out, epochs=20.0, is_resumed=True)
    assert 0 < resumed.step < whole.step
    resumed.run(say=silent)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


def test_the_command_trains_and_writes_down_what_it_did(
    model_folder: Path, corpus: Path, same_held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLITE_THREADS", "1")
    options = [option for setting in SETTINGS for option in ("--config", setting)]
    where = ["--target", str(model_folder), "--corpus", str(corpus), "--held-out", str(same_held_out)]
    assert main(["train", *where, "--out", str(tmp_path / "out"), "--epochs", "1", *options]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "model.safetensors", "training.json", "log.csv", "checkpoint.pt"}
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["config"]["batch_size"] == 32
    assert facts["num_anchors"] == NUM_PROMPTS * 2 * (NUM_TOKENS - 1)
    assert main(["train", *where, "--out", str(tmp_path / "out"), "--epochs", "1", *options]) == 1  # a run is there
    swapped = ["--target", str(model_folder), "--corpus", str(corpus), "--held-out", str(corpus)]
    assert main(["train", *swapped, "--out", str(tmp_path / "other"), "--epochs", "1", *options]) == 1


def test_a_head_can_begin_as_the_targets(model_folder: Path, target: Target, corpus: Path, tmp_path: Path) -> None:
    run = trainer(model_folder, corpus, tmp_path, "has_target_head=true", "rank=32")
    assert isinstance(run.student, DLiteStudent)
    net, embedding = run.student.model, run.student.embedding
    hidden, state = torch.randn(5, target.hidden_size), torch.zeros(5, 32)
    rows = target.head[net.draft_to_target.long()]
    with torch.no_grad():  # of full rank it is the target's own
        assert torch.allclose(net.sequential_head.logits(state, hidden), hidden @ rows.T, atol=1e-3)
        seen = net.sequential_head.previous(torch.arange(target.vocab_size), embedding)
    assert seen.square().mean().item() == pytest.approx(1.0, rel=1e-3)
    cut = trainer(model_folder, corpus, tmp_path / "cut", "has_target_head=true", "rank=8")
    assert isinstance(cut.student, DLiteStudent)
    with torch.no_grad():
        near = cut.student.model.sequential_head.logits(torch.zeros(5, 8), hidden)
    best = torch.linalg.svdvals(rows)[8:].square().sum() / rows.square().sum()
    assert ((near - hidden @ rows.T).square().sum() / (hidden @ rows.T).square().sum()).item() < 2 * best.item()
    with pytest.raises(ConfigError, match="rank is 33"):
        trainer(model_folder, corpus, tmp_path / "wide", "has_target_head=true", "rank=33")


@pytest.mark.parametrize("kind", ["dspark", "independent"])
def test_a_baselines_first_logits_are_tame(model_folder: Path, corpus: Path, tmp_path: Path, kind: str) -> None:
    run = trainer(model_folder, corpus, tmp_path, f"kind={kind}")
    batch = next(run.stream.batches(Position()))
    with torch.no_grad():
        logits, _ = run.student.logits(run.student.hidden(batch), batch, batch.tokens)
    assert 0.3 < logits.std(dim=-1).mean().item() < 3.0


def test_a_baseline_needs_a_corpus_with_whole_prompts(model_folder: Path, target: Target, tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path / "corpus", facts_of(target, is_held_out=False))
    writer.add(answer(target, 0, 0)[0])
    writer.close()
    run = trainer(model_folder, tmp_path / "corpus", tmp_path / "out", "kind=dspark")
    with pytest.raises(ConfigError, match="--contexts"):
        run.run(say=silent)


def test_two_processes_train_one_drafter_and_resume(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    """Each takes every second batch; their mean gradient is that of both batches together, so the weights agree."""
    changes = ("num_resident=99", "scheduled_sampling=0")
    alone = trainer(model_folder, corpus, tmp_path / "alone", "batch_size=64", *changes, epochs=2.0)
    start = torch.cat([tensor.flatten() for tensor in weights(alone)])
    alone.run(say=silent)
    out, settings = tmp_path / "together", [*SETTINGS, *changes]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["dlite_agent.cli", "train", "--target", str(model_folder), "--corpus", str(corpus), "--out", str(out)]
    command += ["--epochs", "2", *[option for setting in settings for option in ("--config", setting)]]
    environment = {**os.environ, "DLITE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 1  # the first one speaks
    content = torch.load(out / "checkpoint.pt", weights_only=True)
    assert content["step"] == alone.step
    way, other_way = (
        torch.cat([tensor.flatten().float() for tensor in parts]) - start
        for parts in (weights(alone), content["model"].values())
    )
    # Two batches of 32 are one of 64, but for the end of an epoch. Without the mean it would be 0.8.
    assert torch.cosine_similarity(way, other_way, dim=0) > 0.95
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 1  # a run is there
    again = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


def test_a_run_with_other_options_or_of_another_corpus_is_not_resumed(
    model_folder: Path, corpus: Path, same_held_out: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer(model_folder, corpus, tmp_path, is_resumed=True)
    trainer(model_folder, corpus, tmp_path, epochs=0.1).run(say=silent)
    with pytest.raises(ConfigError, match="trained with config"):
        trainer(model_folder, corpus, tmp_path, "seed=1", is_resumed=True)
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        trainer(model_folder, corpus, tmp_path, is_resumed=True)


@pytest.mark.parametrize(
    "setting",
    [
        "ranks=3",
        "rank",
        "rank=many",
        "batch_size=0",
        "has_confidence=maybe",
        "clip=0",
        "precision=int8",
        "feature_noise=-1",
    ],
)
def test_a_setting_that_cannot_be_is_an_error(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        TrainConfig.parse([setting])


def test_settings_are_read_by_their_type() -> None:
    config = TrainConfig.parse(["rank=64", "learning_rate=1e-3", "has_confidence=false"])
    assert (config.rank, config.learning_rate, config.has_confidence) == (64, 1e-3, False)


def test_the_learning_rate_rises_then_falls_over_the_plan() -> None:
    config = TrainConfig(learning_rate=1.0, warm_up=0.1, final_rate=0.2)
    rates = [learning_rate(step / 100, config) for step in range(101)]
    assert rates[:11] == pytest.approx([step / 10 for step in range(11)])
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2)
    assert Plan(num_steps=10, minutes=1.0).progress(step=5, seconds=45.0) == 0.75
    with pytest.raises(ConfigError, match="without an end"):
        Plan()


def text_batch(corpus: Path, *, look_back: int | None) -> Batch:
    table = AnchorTable([read_shard(shard_paths(corpus)[0])])
    reader = ContextReader(context_paths(corpus))
    return table.gather_answers([1, 0], num_drafts=4, reader=reader, look_back=look_back)


def test_texts_are_prompts_and_answers_and_windows_the_rows_before_the_pivots(target: Target, corpus: Path) -> None:
    whole, cut = (text_batch(corpus, look_back=n) for n in (None, 3))
    shard = read_shard(shard_paths(corpus)[0])
    windows, is_there = window_rows(whole, 4)
    for text, number in zip(whole.texts, (1, 0), strict=True):
        tokens = shard.answer(number).tokens.tolist()
        ids = [*prompt(int(shard.facts["prompt_key"][number])), *tokens]
        assert text.ids.tolist() == ids
        assert text.positions.tolist() == list(range(6, 6 + len(tokens) - 1))
        rows = target.forward(ids[:-1], target.new_cache(), num_features=len(ids) - 1).features
        assert torch.allclose(text.features.float(), rows, rtol=2**-7, atol=1e-3)
    row = 0
    for text in whole.texts:
        for position in text.positions.tolist():
            assert torch.equal(whole.pivot[row], text.features[position - 1].float())
            for offset in range(4):
                at = position - 5 + offset
                assert bool(is_there[row, offset]) == (at >= 0)
                if at >= 0:
                    assert torch.equal(windows[row, offset], text.features[at].float())
            row += 1
    assert row == len(whole)
    assert cut.texts[0].first_row == 2
    near, _ = window_rows(cut, 3)
    assert torch.equal(near, windows[:, 1:])


def test_a_teacher_sees_its_window_and_nothing_else(target: Target, corpus: Path) -> None:
    shape = TrainConfig.parse([*SETTINGS, "num_drafts=4"]).shape(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        layer_ids=target.layer_ids,
    )
    assert isinstance(shape, DLiteConfig)
    torch.manual_seed(0)
    model = Teacher(shape, window=4)
    batch = text_batch(corpus, look_back=4)
    windows, is_there = window_rows(batch, 4)

    def hidden(windows: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        return model.hidden(batch.pivot, windows, is_there, batch.anchors, target.embedding)

    with torch.no_grad():
        first = hidden(windows, is_there)
        for offset in range(4):
            changed = windows.clone()
            changed[:, offset] += 1
            moved = (hidden(changed, is_there) - first).abs().amax(dim=(1, 2)) > 1e-6
            assert torch.equal(moved, is_there[:, offset])
        alone = model.net.hidden(batch.pivot, batch.anchors, target.embedding)
        assert torch.allclose(hidden(windows, torch.zeros_like(is_there)), alone, atol=1e-6)


def test_a_student_learns_from_its_teacher_first_head_frozen_and_then_from_the_target(
    model_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    taught = trainer(model_folder, corpus, tmp_path / "teacher", "kind=teacher", "window=3", epochs=20.0)
    taught.run(say=silent)
    assert {path.name for path in (tmp_path / "teacher").iterdir()} == {
        "teacher.safetensors",
        "training.json",
        "log.csv",
        "checkpoint.pt",
    }
    settings = ("distill=0.5", "transition=0.3", "scheduled_sampling=0")
    options: dict[str, Any] = {"teacher": tmp_path / "teacher", "epochs": 20.0, "report_every": 10}
    run = trainer(model_folder, corpus, tmp_path / "student", *settings, **options)
    assert isinstance(run.student, DLiteStudent)
    head = run.student.model.sequential_head
    start = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    teachers = taught.student.model.get_submodule("net.sequential_head").state_dict()
    assert all(torch.equal(start[name], teachers[name]) for name in start)
    run.run(say=silent, should_stop=lambda: run.progress >= 0.45)
    assert all(torch.equal(start[name], tensor) for name, tensor in head.state_dict().items())
    gaps = [float(row["loss"]) for row in log_of(tmp_path / "student")]  # the divergence from the teacher alone
    assert gaps[-1] < gaps[0] / 2
    resumed = trainer(model_folder, corpus, tmp_path / "student", *settings, is_resumed=True, **options)
    resumed.run(say=silent)
    assert isinstance(resumed.student, DLiteStudent)
    own = resumed.student.model.sequential_head.state_dict()
    assert not any(torch.equal(start[name], tensor) for name, tensor in own.items())


def test_the_teachers_weight_falls_along_a_cosine() -> None:
    weights = [teacher_weight(p, distill=0.3, transition=0.2) for p in (0.0, 0.29, 0.3, 0.4, 0.5, 1.0)]
    assert weights == pytest.approx([1, 1, 1, 0.5, 0, 0])
    assert teacher_weight(0.0, distill=0.0, transition=0.0) == 0.0
    p, q = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert divergence(p.log(), q.log()).item() == pytest.approx(expected)
    assert divergence(p.log(), p.log() + 3).item() == pytest.approx(0, abs=1e-6)


def test_a_teacher_that_cannot_teach_is_refused(model_folder: Path, corpus: Path, tmp_path: Path) -> None:
    trainer(model_folder, corpus, tmp_path / "plain", epochs=0.1).run(say=silent)
    trainer(model_folder, corpus, tmp_path / "wide", "kind=teacher", "rank=16", epochs=0.1).run(say=silent)
    for teacher, settings, problem in (
        ("plain", (), "expected a teacher"),
        ("nothing", (), "no training run"),
        ("wide", (), "head of another shape"),
        ("wide", ("kind=dspark",), "leave --teacher out"),
    ):
        with pytest.raises(ConfigError, match=problem):
            trainer(model_folder, corpus, tmp_path / "out", *settings, teacher=tmp_path / teacher)
