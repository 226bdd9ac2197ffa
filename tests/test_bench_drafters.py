"""The drafter benchmark: every figure is there, what it counts is what happened, and a wrong drafter is found out."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage

from dlite_agent import runtime as runtimes
from dlite_agent.bench.contest import OurSide
from dlite_agent.bench.drafters import measure, plots, shift
from dlite_agent.bench.drafters.cost import draft_costs
from dlite_agent.bench.drafters.figures import DrafterReport, headline
from dlite_agent.bench.drafters.held_bytes import HeldBytes, reachable_bytes
from dlite_agent.bench.drafters.held_out import HeldOutSession, held_out_sessions
from dlite_agent.bench.drafters.measure import DrafterOptions, golden_error
from dlite_agent.bench.drafters.reply_parts import token_kinds
from dlite_agent.bench.drafters.sessions import Bounds, Contestant, SessionBench, contestant
from dlite_agent.bench.drafters.tally import Mode, Record, Records, bucket
from dlite_agent.bench.drafters.turn_changes import PLAN_EDIT, RESUME, TOOL_RESULT, TurnChanges
from dlite_agent.cli import main
from dlite_agent.config import Settings
from dlite_agent.drafters import baselines, checkpoint
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.history import HistoryConfig
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.loading import load_drafter, trained_for
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal
from dlite_agent.engine import decode as decoding
from dlite_agent.engine.draft_length import PassCost
from dlite_agent.engine.products import pack
from dlite_agent.engine.request import Step
from dlite_agent.engine.target import Target
from dlite_agent.engine.verify import Verdict, verify
from dlite_agent.errors import ConfigError, MissingDependencyError
from dlite_agent.runtime import Runtime
from dlite_agent.testing import TargetDrafter, random_dlite, tiny_target, write_tiny_chat_model

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PROMPT = [11, 12, 13, 14] * 16


pytestmark = pytest.mark.usefixtures("command_home")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_chat_model(folder / "model", max_position_embeddings=2048, num_hidden_layers=2)


@pytest.fixture(scope="module")
def runtime(model: Path, folder: Path) -> Iterator[Runtime]:
    settings = Settings(home=folder / "home", threads=1, offline=True)
    yield runtimes.shared_runtime(str(model), drafter="null", quantize=None, store=None, settings=settings)
    runtimes.close_all()


@pytest.fixture(scope="module")
def dlite(model: Path, folder: Path) -> Path:
    """A DLite checkpoint with random weights."""
    target = Target.load(model)
    checkpoint.save(random_dlite(target, group=2), folder / "dlite")
    return folder / "dlite"


@pytest.fixture(scope="module")
def dspark(model: Path, folder: Path) -> Path:
    """A baseline with a history, with random weights."""
    target = Target.load(model)
    shape = HistoryConfig(
        kind="dspark",
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=(0, target.num_layers - 1),
        num_drafts=7,
        draft_vocab_size=target.vocab_size,
        rank=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        baselines.save(baselines.new_model(shape), folder / "dspark")
    return folder / "dspark"


@pytest.fixture(scope="module")
def workloads(folder: Path) -> Path:
    """Two agent families and open questions, all held out but the last session of each agent family."""
    place = folder / "workloads"
    for name in ("agent", "tools", "general"):
        (place / name).mkdir(parents=True)
    (place / "tools" / "sums.json").write_text(json.dumps([ADD]))
    messages = [
        {"role": "user", "content": "add 1"},
        call_of(1),
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "once more"},
        call_of(2),
    ]
    for family, file in (("apibank", "apibank_l1"), ("bfcl_mt", "bfcl_multi_turn")):
        records = [{"id": f"{family}/{n}", "toolsets": ["sums"], "messages": messages} for n in range(3)]
        write_lines(place / "agent" / f"{file}.jsonl", records)
    write_lines(place / "general" / "general.jsonl", [{"id": "mt_bench/0", "turns": ["Who?", "And why?"]}])
    listed = ["apibank/0", "apibank/1", "bfcl_mt/0", "bfcl_mt/1", "mt_bench/0"]
    (place / "subsets.json").write_text(json.dumps({"some": listed, "smoke": listed[:1] + listed[2:3] + listed[4:]}))
    return place


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def call_of(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps({"a": number})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def bench(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run the benchmark; returns its JSON line and what it said meanwhile."""
    capsys.readouterr()
    assert main(["bench", "drafters", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    line: dict[str, Any] = json.loads(captured.out.strip().splitlines()[-1])
    return line, captured.err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    assert main(["bench", "drafters", *map(str, arguments)]) == 1
    return capsys.readouterr().err


# The whole of it.


def test_every_figure_of_the_drafters_measured_is_there(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, dlite: Path, dspark: Path, tmp_path: Path
) -> None:
    where = tmp_path / "line.json"
    specs = ["lookup", f"dlite:{dlite}", str(dlite), str(dspark)]
    drafters = [word for spec in specs for word in ("--drafter", spec)]
    asked: list[str | Path] = [
        "--quick",
        "--model",
        model,
        "--workloads",
        workloads,
        "--max-tokens",
        "9",
        "--repeats",
        "1",
    ]
    line, _ = bench(capsys, *asked, *drafters, "--json", where)
    figures, details = line["figures"], line["details"][str(model)]
    assert figures.keys() == {
        "speed_over_dspark",
        "tau_over_dspark",
        "hybrid_over_lookup",
        "hybrid_over_plain",
        "draft_8k_over_512",
        "draft_over_verify",
        "drafter_state_bytes",
        "shift_100k",
        "mismatches",
    } | ({"hybrid_tau_tools"} & figures.keys())  # a model of noise need not call tools
    assert all(math.isfinite(value) and value >= 0 for value in figures.values())
    assert figures["mismatches"] == figures["shift_100k"] == figures["drafter_state_bytes"] == 0
    assert details["names"] == dict(zip(["null", *specs], ["null", "lookup", "dlite", "hybrid", "dspark"], strict=True))
    measured = details["drafters"]
    assert {measured[spec]["turns"] for spec in measured} == {2 * 3 + 2}
    assert {measured[spec]["faults"] for spec in measured} == {0}
    assert measured["null"]["tau"]["greedy"]["all"] == measured["null"]["tau"]["seeded"]["all"] == 1
    assert all(measured[spec]["tau"]["greedy"]["by_family"].keys() == {"apibank", "bfcl", "general"} for spec in specs)
    assert measured[str(dspark)]["held_bytes_per_token"] > 0
    assert all(measured[spec]["held_bytes_most"] == 0 for spec in ["null", *specs[:3]])
    assert details["pivot_bytes"] == 2 * 32 * 4  # two layers are all there are
    assert details["mismatches"] == []
    assert line["seed"] == 0
    assert json.loads(where.read_text()) == line


def test_a_restart_measures_only_what_is_missing(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    workloads: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "journal.jsonl"
    asked: list[str | Path] = [
        "--model",
        model,
        "--workloads",
        workloads,
        "--subset",
        "some",
        "--max-tokens",
        "4",
        "--out",
        out,
    ]
    asked = [*asked, "--repeats", "0", "--drafter", "lookup"]
    whole = SessionBench.measure
    left = [2]

    def killed(bench: SessionBench, session: HeldOutSession) -> list[Record]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return whole(bench, session)

    monkeypatch.setattr(SessionBench, "measure", killed)
    assert main(["bench", "drafters", *map(str, asked)]) == 130
    assert len(out.read_text().splitlines()) == 2 * 2  # two sessions, two drafters
    cut = out.read_text()[:-40]  # the last record is half written: its session is measured again
    out.write_text(cut)
    left[0] = 99
    first, said = bench(capsys, *asked)
    assert "1 of 5" not in said
    assert all(f"{n} of 5" in said for n in (2, 3, 4, 5))
    left[0] = 0
    second, said = bench(capsys, *asked)
    assert "of 5: " not in said
    for key in ("turns", "tau", "tool_tokens", "tokens_per_s"):
        assert [d[key] for d in tau_of(first, model)] == [d[key] for d in tau_of(second, model)]
    left[0] = 99
    _, said = bench(capsys, *asked, "--drafter", "null", "--drafter", "auto")
    assert "1 of 5" in said  # with another drafter, all are measured again


def tau_of(line: dict[str, Any], model: Path) -> list[dict[str, Any]]:
    return list(line["details"][str(model)]["drafters"].values())


def accept_all(logits: torch.Tensor, draft: Sequence[int], *arguments: Any, **options: Any) -> Verdict:
    """Verify as an engine would that has forgotten to."""
    if not draft:
        return verify(logits, draft, *arguments, **options)
    return Verdict((*draft, int(logits[-1].argmax())), len(draft))


def test_a_drafter_that_changes_the_text_is_found_out(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "verify", accept_all)
    asked: list[str | Path] = ["--quick", "--model", model, "--workloads", workloads, "--limit", "1", "--repeats", "0"]
    line, _ = bench(capsys, *asked, "--drafter", "lookup", code=1)
    found = line["details"][str(model)]["mismatches"]
    assert line["figures"]["mismatches"] == len(found) > 0
    assert {mismatch["mode"].split(", ")[1] for mismatch in found} == {"lookup"}
    assert {mismatch["mode"].split(", ")[0] for mismatch in found} == {"greedy", "seeded", "speed"}


def test_a_drafter_of_another_target_is_left_out(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, tmp_path: Path
) -> None:
    checkpoint.save(random_dlite(tiny_target("llama")), tmp_path / "other")
    asked: list[str | Path] = ["--quick", "--model", model, "--workloads", workloads, "--limit", "1", "--repeats", "0"]
    line, said = bench(capsys, *asked, "--max-tokens", "4", "--drafter", tmp_path / "other")
    assert "left out" in said
    assert "vocab_size" in said
    assert line["details"][str(model)]["names"] == {"null": "null"}


def test_whatever_was_trained_for_a_target_is_measured(
    model: Path, dlite: Path, dspark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(model)
    monkeypatch.setattr(measure, "trained_for", partial(trained_for, folder=tmp_path))
    assert measure.default_drafters(target) == ["null", "lookup"]
    for kind, folder in (("dspark", dspark), ("dlite", dlite)):
        shutil.copytree(folder, tmp_path / kind)
    path = tmp_path / "dspark" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_names": ["model"]}))
    assert measure.default_drafters(target) == ["null", "lookup", "dspark"]
    checkpoint.save(random_dlite(target, group=2), tmp_path / "dlite", target_names=["model"])
    assert measure.default_drafters(target) == ["null", "lookup", "dlite", "dspark", "auto"]


def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, tmp_path: Path
) -> None:
    assert "--workloads" in fails(capsys, "--model", model)
    assert "nosuch" in fails(capsys, "--model", model, "--workloads", workloads, "--subset", "nosuch")
    assert "nosuch" in fails(capsys, "--model", model, "--workloads", workloads, "--drafter", "nosuch")
    assert "reference checkpoint" in fails(capsys, "--workloads", workloads, "--golden", tmp_path)
    asked: list[str | Path] = ["--quick", "--model", model, "--workloads", workloads, "--drafter", "lookup"]
    assert "no turn" in fails(capsys, *asked, "--min-prompt", "1", "--max-prompt", "1")
    for wrong in ({"max_tokens": 2}, {"num_rounds": -1}, {"min_prompt": 20_000}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DrafterOptions(**wrong)  # type: ignore[arg-type]


# Which sessions are measured.


def test_only_held_out_sessions_are_measured_and_families_take_turns(workloads: Path) -> None:
    said: list[str] = []
    sessions = held_out_sessions(workloads, say=said.append)
    held_out = {"apibank/0", "apibank/1", "bfcl_mt/0", "bfcl_mt/1", "mt_bench/0"}
    assert {session.id for session in sessions} >= held_out
    assert len(said) == (len(sessions) < 7)
    assert {session.family for session in held_out_sessions(workloads, min_turns=3)} == {"apibank", "bfcl"}
    with pytest.raises(ConfigError, match="fewer turns"):
        held_out_sessions(workloads, min_turns=4)
    assert [session.family for session in sessions[:3]] == ["apibank", "bfcl", "general"]
    assert [session.is_agent for session in sessions[:3]] == [True, True, False]
    assert [s.id for s in held_out_sessions(workloads, limit=2)] == [s.id for s in sessions[:2]]
    assert {s.id for s in held_out_sessions(workloads, subset="smoke")} == {"apibank/0", "bfcl_mt/0", "mt_bench/0"}


def test_training_sessions_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    records = [{"id": f"mint/{n}", "messages": messages} for n in range(40)]
    write_lines(tmp_path / "agent" / "mint.jsonl", records)
    (tmp_path / "subsets.json").write_text(json.dumps({"some": ["mint/3"]}))
    said: list[str] = []
    sessions = held_out_sessions(tmp_path, say=said.append)
    assert "mint/3" in {session.id for session in sessions}
    assert len(sessions) < 20  # a share of 5 % and the listed one
    assert said[0].startswith(f"{40 - len(sessions)} of 40 sessions")


def test_turns_are_spread_evenly_unless_one_needs_the_reply_to_another(workloads: Path) -> None:
    by_id = {session.id: session for session in held_out_sessions(workloads)}
    agent, questions = by_id["apibank/0"], by_id["mt_bench/0"]
    assert agent.chosen_turns(None) == agent.chosen_turns(3) == [0, 1, 2]
    assert agent.chosen_turns(2) == [0, 2]
    assert agent.chosen_turns(1) == [2]
    assert questions.chosen_turns(1) == [0, 1]


# What is counted.


def kinds_of(reply: str, runtime: Runtime, tools: Sequence[dict[str, Any]] = (ADD,)) -> str:
    """The kind of each byte of a reply: T or P."""
    tokens = runtime.encoder.encode(reply)
    return "".join("T" if kind == "tool" else "P" for kind in token_kinds(tokens, runtime, tools))


def test_tokens_are_a_calls_where_the_parser_shows_no_text(runtime: Runtime) -> None:
    assert kinds_of("It is 2.", runtime) == "P" * 8
    assert kinds_of(f"So:\n{CALL}", runtime) == "PPP" + "T" * (1 + len(CALL))
    assert kinds_of(f"{CALL}{CALL} done", runtime) == "T" * (2 * len(CALL) + 5)
    assert kinds_of(CALL, runtime, tools=()) == "T" * len(CALL)  # the product takes it for one
    bare = '{"name": "add", "arguments": {"a": 1}}'
    assert kinds_of(bare, runtime) == "T" * len(bare)
    assert kinds_of(bare.replace("add", "sub"), runtime) == "P" * len(bare)
    thought = f"<think>\nwhy {CALL}\n</think>\n\n"
    assert kinds_of(f"{thought}So:\n{CALL}", runtime) == "P" * (len(thought) + 3) + "T" * (1 + len(CALL))
    assert kinds_of(f"é {CALL[:20]}", runtime) == "PP" + "T" * 21  # two bytes, a space, a call that is cut off


def test_an_end_token_belongs_to_what_it_ends(runtime: Runtime) -> None:
    (end,) = runtime.end_ids
    assert token_kinds([*runtime.encoder.encode(CALL), end], runtime, [ADD])[-1] == "tool"
    assert token_kinds([*runtime.encoder.encode("hi"), end], runtime, [ADD]) == ["prose"] * 3
    assert token_kinds([end], runtime, [ADD]) == ["prose"]
    assert token_kinds([], runtime, [ADD]) == []


def step(num_tokens: int, *, drafted: int = 0, is_ended: bool = False) -> Step:
    sources = ["dlite"] * (num_tokens - 1) + ["dlite" if is_ended else "bonus"]
    return Step(tuple(range(num_tokens)), tuple(sources), num_proposed=drafted, draft_seconds=0.001)


def record_of(
    drafter: str, *, session: str = "s", family: str = "f", is_agent: bool = True, laps: Sequence[Any] = ()
) -> Record:
    """A record of some laps: mode, tokens of each pass behind the first, seconds of each, kind, turn, prompt."""
    record = Record(session, family, is_agent, drafter)
    for mode, tokens, seconds, kind, turn, prompt in laps:
        steps = [(9.0, step(1)), *((seconds, step(count, drafted=7)) for count in tokens)]
        record.add_lap(mode, steps, [kind] * (1 + sum(tokens)), turn=turn, prompt=prompt)
    return record


def test_a_pass_is_counted_where_its_first_token_lies_and_the_first_pass_nowhere() -> None:
    record = Record("s", "f", True, "d")
    steps = [(9.0, step(1)), (0.5, step(3, drafted=7)), (0.25, step(2, drafted=1, is_ended=True))]
    record.add_lap("greedy", steps, ["prose", "prose", "tool", "tool", "tool", "tool"], turn=4, prompt=997)
    records = Records([record])
    assert records.tau("d", "greedy") == 5 / 2
    assert records.tau("d", "greedy", kind="prose", context="<1k", turn="5-9") == 3
    assert records.tau("d", "greedy", kind="tool", context="1-4k", turn="5-9") == 2
    assert records.tau("d", "seeded") is None
    assert records.rate("d") is None
    assert records.draft_ms("d") == 1.0
    assert record.drafted_at == [2, 1, 1, 1, 1, 1, 1]
    assert record.reached_at == [2, 1, 1, 0, 0, 0, 0]
    assert record.accepted_at == [2, 1, 0, 0, 0, 0, 0]  # the last draft was one token, and an end: no bonus


def test_buckets_begin_where_they_say() -> None:
    turns = {"1": 1, "2-4": 4, "5+": 1 << 30}
    assert [bucket(turn, turns) for turn in (1, 2, 4, 5, 99)] == ["1", "2-4", "2-4", "5+", "5+"]


def test_a_record_comes_back_from_json_as_it_was() -> None:
    record = record_of("d", laps=[("greedy", [2, 3], 0.5, "tool", 0, 10), ("speed", [1], 0.5, "prose", 12, 9000)])
    record.held.append((10, 3))
    assert Record.from_dict(json.loads(json.dumps(record.as_dict()))) == record


def test_figures_are_ratios_of_the_same_sessions_families_counting_alike() -> None:
    def laps(tokens: Sequence[int], seconds: float, turn: int = 0, prompt: int = 10) -> list[Any]:
        modes: tuple[Mode, ...] = ("greedy", "seeded", "speed")
        return [(mode, tokens, seconds, "tool", turn, prompt) for mode in modes]

    records = [
        record_of("dlite", session="a", family="x", laps=[*laps([2, 2], 1.0), *laps([4], 1.0, turn=11)]),
        record_of("/d", session="a", family="x", laps=[*laps([1] * 4, 1.0), *laps([2, 2], 1.0, turn=11)]),
        record_of("dlite", session="b", family="y", laps=laps([6], 1.0, prompt=9000)),
        record_of("/d", session="b", family="y", laps=laps([2, 2, 2], 2.0, prompt=9000)),
        record_of("dlite", session="c", family="z", is_agent=False, laps=laps([8], 1.0)),
        record_of("/d", session="c", family="z", is_agent=False, laps=laps([1] * 8, 50.0)),
    ]
    records[0].held += [(10, 0), (20, 7)]
    report = DrafterReport({"dlite": "dlite", "/d": "dspark"}, Records(records))
    figures = report.figures()
    assert figures["speed_over_dspark"] == pytest.approx((2 + 6) / 2)
    assert figures["speed_over_dspark_8k"] == pytest.approx(6)
    assert figures["tau_over_dspark"] == pytest.approx((14 / 4) / (14 / 9))
    assert figures["tau_late_over_first"] == pytest.approx(4 / 2)  # session a alone got that far
    assert report.late_over_first("dspark", "greedy") == pytest.approx(2 / 1)
    assert figures["drafter_state_bytes"] == 7
    assert "hybrid_over_lookup" not in figures
    assert "draft_8k_over_512" not in figures


def test_the_headline_is_of_the_target_it_is_worst_for() -> None:
    reports = {
        name: DrafterReport({"dlite": "dlite"}, Records([]), checks={"shift_100k": value, "tau_over_dspark": value})
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    worst = headline(reports)
    assert worst["shift_100k"] == 2.0
    assert worst["tau_over_dspark"] == 1.0
    assert worst["mismatches"] == 0.0


# Sessions.


def contestants_of(target: Target, *drafters: Drafter) -> list[Contestant]:
    cost = PassCost({1: 1.0})
    return [contestant(drafter.name, drafter, target, cost) for drafter in drafters]


def test_a_second_question_is_asked_behind_the_targets_own_reply(runtime: Runtime, workloads: Path) -> None:
    (session,) = [s for s in held_out_sessions(workloads) if s.id == "mt_bench/0"]
    measured = SessionBench(runtime, contestants_of(runtime.target, NullDrafter()), Bounds(1000, 12)).measure(session)
    asked, again = [message for message in session.turns[1].messages if message is not None]
    first = runtime.encoder.encode(runtime.render([asked], []))
    reply = OurSide(runtime.target, end_ids=runtime.end_ids).run(first, NullDrafter(), max_tokens=12).tokens
    text = runtime.encoder.decode([token for token in reply if token not in runtime.end_ids])
    second = runtime.encoder.encode(runtime.render([asked, AIMessage(text), again], []))
    assert len(second) > len(first) + len(reply)
    assert [context for context, _ in measured[0].held] == [len(first), len(second)]


def test_a_drafter_that_is_the_target_has_all_accepted_and_too_long_prompts_are_skipped(
    runtime: Runtime, workloads: Path
) -> None:
    (session,) = [s for s in held_out_sessions(workloads) if s.id == "apibank/0"]
    contestants = contestants_of(runtime.target, NullDrafter(), TargetDrafter(runtime.target))
    plain, perfect = SessionBench(runtime, contestants, Bounds(2000, 18)).measure(session)
    records = Records([plain, perfect])
    assert records.mismatches() == []
    assert (plain.turns, perfect.turns) == (3, 3)
    greedy = records.cell("target", "greedy")
    assert perfect.accepted_at == perfect.drafted_at
    assert greedy.tokens == records.cell("null", "greedy").tokens
    assert greedy.passes < records.cell("null", "greedy").passes
    most = plain.held[0][0]
    (short,) = SessionBench(runtime, contestants[:1], Bounds(most, 18)).measure(session)
    assert (short.turns, short.skipped) == (1, 2)


def test_too_short_prompts_are_not_counted_but_the_last_of_them_is_decoded(runtime: Runtime, workloads: Path) -> None:
    (session,) = [s for s in held_out_sessions(workloads) if s.id == "apibank/0"]
    (whole,) = SessionBench(runtime, contestants_of(runtime.target, NullDrafter()), Bounds(2000, 18)).measure(session)
    first, second, third = (context for context, _ in whole.held)
    for least, counted, decoded in ((second, [second, third], first), (third, [third], second)):
        reader = Hoarder()
        contestants = contestants_of(runtime.target, NullDrafter(), reader)
        measured = SessionBench(runtime, contestants, Bounds(2000, 18, min_prompt=least)).measure(session)
        for record in measured:
            assert [context for context, _ in record.held] == counted
            assert (record.turns, record.skipped) == (len(counted), 3 - len(counted))
            assert 0 < record.turn_tokens < whole.turn_tokens
        assert decoded <= min(reader.seen) <= decoded + 1


def test_a_long_question_behind_a_short_one_is_asked_behind_its_reply(runtime: Runtime, workloads: Path) -> None:
    (session,) = [s for s in held_out_sessions(workloads) if s.id == "mt_bench/0"]
    contestants = contestants_of(runtime.target, NullDrafter())
    (whole,) = SessionBench(runtime, contestants, Bounds(1000, 12)).measure(session)
    (late,) = SessionBench(runtime, contestants, Bounds(1000, 12, min_prompt=whole.held[1][0])).measure(session)
    assert late.held == whole.held[1:]
    assert (late.turns, late.skipped) == (1, 1)


# What drafters hold.


class Hoarder:
    """Keeps every text it has seen, and does not say so."""

    name = "hoarder"

    def __init__(self) -> None:
        self.seen: dict[int, list[Any]] = {}

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        for view in views:
            self.seen.setdefault(len(view.ids), []).append(view.ids.copy())
        return [Proposal((), self.name) for _ in views]


def test_replies_are_held_to_the_tools_and_what_that_forces_is_drafted(
    runtime: Runtime, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = held_out_sessions(workloads)[0]
    drafters = contestants_of(runtime.target, NullDrafter(), LookupDrafter())
    called = partial(runtime.grammars.tool_call, choice="any")  # a model with random weights calls no tool by itself
    monkeypatch.setattr(runtime.grammars, "tool_call", lambda tools, choice, dialect: called(tools, dialect=dialect))
    held, free = (
        Records(SessionBench(runtime, drafters, Bounds(1000, 40, has_grammar=has_grammar)).measure(session))
        for has_grammar in (True, False)
    )
    assert not held.mismatches() and not free.mismatches()
    assert held.cell("null", "greedy", kind="tool").tokens > 0
    assert held.tau("null", "greedy", kind="tool") == 1.0
    lookup = held.tau("lookup", "greedy", kind="tool")
    assert lookup is not None and lookup > 1.5  # {"name": "add", "arguments": {"a": leaves no choice
    assert free.cell("null", "greedy", kind="tool").tokens == 0


def test_a_drafter_that_keeps_texts_unsaid_is_found_out(llama: Target) -> None:
    bytes_held = {}
    for drafter in (Hoarder(), HybridDrafter(LookupDrafter(), DLiteDrafter(random_dlite(llama), llama.embedding))):
        (found,) = contestants_of(llama, drafter)
        found.warm_up(llama, list(Bounds(1, 1).sampling().values()))
        assert found.held() == 0
        OurSide(llama, end_ids=frozenset()).run(PROMPT, drafter, max_tokens=24)
        bytes_held[drafter.name] = found.held()
    assert bytes_held["hoarder"] > 20 * 4 * len(PROMPT)
    assert bytes_held["hybrid"] == 0


def test_a_drafters_word_for_what_it_holds_is_taken(llama: Target, model: Path, dspark: Path) -> None:
    target = Target.load(model)
    drafter = load_drafter(str(dspark), target)
    (found,) = contestants_of(target, drafter)
    assert found.has_memory
    assert not contestants_of(llama, LookupDrafter())[0].has_memory
    side = OurSide(target, end_ids=frozenset())
    side.run(PROMPT, drafter, max_tokens=4)
    held = found.held()
    assert held == drafter.state_bytes() > 0  # type: ignore[attr-defined]
    del side
    assert found.held() == 0


def test_bytes_are_counted_once_through_attributes_slots_containers_and_views() -> None:
    big = torch.zeros(1000)

    class Slotted:
        __slots__ = ("inside",)

        def __init__(self) -> None:
            self.inside: Any = None

    holder, slotted = Hoarder(), Slotted()
    empty = reachable_bytes(holder)
    slotted.inside = (big, [big[:10]])
    holder.seen[0] = [slotted, big]
    assert 4000 < reachable_bytes(holder) - empty < 6000
    counted = HeldBytes(holder)
    holder.seen[1] = ["x" * 5000]
    assert 5000 < counted() < 6000


def test_packed_weights_are_counted_once() -> None:
    packed = pack(torch.zeros(64, 48))
    assert 64 * 48 * 4 <= reachable_bytes([packed, packed]) - reachable_bytes([]) < 2 * 64 * 48 * 4


# Positions, costs and changes of turn.


class Positional(DLiteDrafter):
    """A DLite drafter that sees how long a text is."""

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        seen = [
            DraftView(v.ids, v.drafted, v.pivot * (1 + len(v.ids) / 1e5), v.max_tokens)
            for v in views
            if v.pivot is not None
        ]
        return super().propose(seen)


def test_a_dlite_drafter_does_not_see_positions_and_one_that_does_is_found_out(llama: Target) -> None:
    network = random_dlite(llama, group=2)
    side = OurSide(llama, end_ids=frozenset())
    drafter = DLiteDrafter(network, llama.embedding)
    assert shift.largest_change(drafter, side, PROMPT, max_tokens=8) == 0
    assert shift.largest_change(Positional(network, llama.embedding), side, PROMPT, max_tokens=8) > 1e-3
    assert shift.dlite_of(HybridDrafter(LookupDrafter(), drafter)) is drafter
    assert shift.dlite_of(LookupDrafter()) is None


def test_a_change_of_turn_computes_what_is_new_and_what_the_drafter_forces(model: Path, dspark: Path) -> None:
    target = Target.load(model)
    specs = {"null": "null", "lookup": "lookup", "dspark": str(dspark)}
    drafters = {name: load_drafter(spec, target) for name, spec in specs.items()}
    base = [token % 200 for token in range(300)]
    result = [token % 7 + 20 for token in range(100)]
    changes = TurnChanges(
        target,
        contestants_of(target, *drafters.values()),
        base=base,
        result=result,
        load=lambda name: load_drafter(specs[name], target),
    )
    costs = changes.measure(num_rounds=2)
    rows = {change: {name: cost.times[0].num_prefilled for name, cost in costs[change].items()} for change in costs}
    assert rows[TOOL_RESULT] == dict.fromkeys(specs, 1 + len(result))  # the reply's last token has no row yet
    assert rows[PLAN_EDIT] == dict.fromkeys(specs, len(base) // 2)
    assert rows[RESUME] == {"null": 33, "lookup": 33, "dspark": len(base) + 16 + 32}
    for change in costs.values():
        assert len(change["dspark"].times) == 2
        assert change["dspark"].times[0].num_drafted > 0
        assert change["null"].extra_seconds == [0.0, 0.0]
        for cost in change.values():
            assert all(0 <= t.draft_seconds <= t.seconds < t.step_seconds for t in cost.times)


def test_drafts_are_timed_at_every_context_and_a_memory_grows_with_it(model: Path, dlite: Path, dspark: Path) -> None:
    target = Target.load(model)
    loaded = [load_drafter(spec, target) for spec in ("null", f"dlite:{dlite}")]
    contestants = contestants_of(target, *loaded)
    contestants += contestants_of(target, load_drafter(str(dspark), target))
    for each in contestants:
        each.warm_up(target, list(Bounds(1, 1).sampling().values()))
    ids = [token % 200 for token in range(1400)]
    costs = draft_costs(target, contestants, ids, contexts=(100, 1400), num_rounds=2)
    assert {name: list(by_context) for name, by_context in costs.items()} == {name: [100, 1400] for name in costs}
    held = {name: [cost.held_bytes for cost in by_context.values()] for name, by_context in costs.items()}
    assert held["null"] == held["dlite"] == [0, 0]
    assert 0 < held["dspark"][0] < held["dspark"][1]
    assert all(cost.draft_ms and min(cost.verify_ms) > 0 for by in costs.values() for cost in by.values())


class NotingLookup(LookupDrafter):
    """Lookup that notes behind how many tokens it drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[int] = []

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        self.contexts += [len(view.ids) for view in views]
        return super().propose(views)


def test_drafts_behind_short_and_long_contexts_are_timed_in_turn() -> None:
    target, drafter = tiny_target("llama", max_position_embeddings=2048), NotingLookup()
    draft_costs(target, contestants_of(target, drafter), [7] * 1000, contexts=(100, 1000), num_rounds=2)
    assert [is_long for is_long, _ in groupby(drafter.contexts, lambda n: n >= 1000)] == [False, True, False, True]


def test_reference_checkpoints_are_compared_and_a_changed_one_is_found_out(
    golden_vectors: Path, tmp_path: Path
) -> None:
    assert 0 < golden_error(golden_vectors) <= 1e-4
    assert golden_error(golden_vectors / "group1") <= golden_error(golden_vectors)
    damaged = tmp_path / "damaged"
    checkpoint.save(checkpoint.load(golden_vectors / "group1"), damaged)
    (damaged / "io.safetensors").write_bytes((golden_vectors / "group1" / "io.safetensors").read_bytes())
    network = checkpoint.load(damaged)
    torch.nn.init.zeros_(network.norm.weight)
    checkpoint.save(network, damaged)
    with pytest.raises(ConfigError, match="damaged"):
        golden_error(damaged)


# Pictures.


def report_with_records() -> DrafterReport:
    records = [record_of("dlite", laps=[("greedy", [2, 3], 0.5, "tool", 0, 10)])]
    records[0].held.append((10, 0))
    return DrafterReport({"dlite": "dlite"}, Records(records))


def test_pictures_without_matplotlib_say_what_to_install(
    capsys: pytest.CaptureFixture[str], workloads: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"dlite-agent\[bench\]"):
        plots.draw(report_with_records(), tmp_path, model="m")
    assert "matplotlib" in fails(capsys, "--workloads", workloads, "--plots", tmp_path)


def test_three_pictures_are_drawn_of_each_target(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plots.draw(report_with_records(), tmp_path / "plots", model="org/a model")
    assert [path.name for path in paths] == [
        "org-a-model-tau-by-turn.png",
        "org-a-model-draft-cost-by-context.png",
        "org-a-model-state-bytes-by-context.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
