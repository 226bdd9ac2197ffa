"""The engine's benchmarks: every figure is there, both sides say the same, and a broken engine is found out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlite_agent.bench import memory, passes
from dlite_agent.bench.contest import Contender, Lap, OurSide, Results, Run, Spread, contest
from dlite_agent.bench.engine import BARS, EngineOptions, ModelReport, headline
from dlite_agent.bench.exact import (
    Comparison,
    SessionReport,
    finished_sessions,
    first_difference,
    gap_between_best,
    sampling_modes,
)
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.peers import ASSISTED, PeerSide, load_stock, lookup_names, peer_contenders
from dlite_agent.bench.peers import PLAIN as PEER_PLAIN
from dlite_agent.bench.prompts import RecordedPrompt
from dlite_agent.bench.verify_cost import ROWS, with_stock_products
from dlite_agent.cli import main
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine import decode as decoding
from dlite_agent.engine.linear import SmallRowLinear
from dlite_agent.engine.sampling import SamplingParams, gumbel_noise, kept_tokens
from dlite_agent.engine.target import Target
from dlite_agent.engine.verify import Verdict, verify
from dlite_agent.errors import ConfigError, DLiteError
from dlite_agent.testing import tiny_target, write_tiny_chat_model

END = frozenset([5])
GREEDY = SamplingParams()
PROMPT = (11, 12, 13, 14) * 6


pytestmark = pytest.mark.usefixtures("command_home")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three short sessions of two tool calls and one reply in prose."""
    folder = tmp_path_factory.mktemp("workloads")
    for name in ("agent", "tools"):
        (folder / name).mkdir()
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    (folder / "tools" / "sums.json").write_text(json.dumps([tool]))
    lines = []
    for number in range(3):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"add {number}"},
            call_of(number),
            {"role": "tool", "tool_call_id": "c", "name": "add", "content": str(number + 1)},
            {"role": "assistant", "content": f"It is {number + 1}."},
            {"role": "user", "content": "once more"},
            call_of(number + 1),
        ]
        lines.append(json.dumps({"id": f"sums/{number}", "toolsets": ["sums"], "messages": messages}) + "\n")
    (folder / "agent" / "sums.jsonl").write_text("".join(lines))
    return folder


def call_of(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps({"a": number})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def bench(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a benchmark; returns its JSON line."""
    capsys.readouterr()
    assert main(["bench", *map(str, arguments)]) == code
    line: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return line


def fails(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    assert main(["bench", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def on(model: Path, workloads: Path, *others: str | Path) -> list[str | Path]:
    """The arguments that say what to measure, and others."""
    return ["--model", model, "--workloads", workloads, *others]


def test_every_figure_is_there_and_finite(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, tmp_path: Path
) -> None:
    where = tmp_path / "out" / "line.json"
    asked = on(model, workloads, "--limit", "2", "--max-tokens", "6", "--json", where)
    line = bench(capsys, "engine", "--quick", "--peers", "--repeats", "1", *asked)
    assert line["bench"] == "engine"
    assert line["figures"].keys() == BARS.keys()
    assert all(math.isfinite(value) for value in line["figures"].values())
    assert all(line["figures"][key] > 0 for key in BARS if key != "mismatches")
    assert line["figures"]["mismatches"] == 0
    details = line["details"][str(model)]
    assert details["differences"] == []
    assert details["int8_mismatches"] == []
    assert {"ours plain", "ours lookup", "transformers plain", "transformers lookup 10"} <= details["rates"].keys()
    assert line["seed"] == 0
    assert json.loads(where.read_text()) == line


def test_only_what_is_asked_for_is_measured(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    line = bench(capsys, "engine", "--quick", "--repeats", "1", "--model", model, "--only", "step_8k_over_512")
    assert line["figures"].keys() == {"step_8k_over_512"}


def test_without_peers_the_other_figures_come(capsys: pytest.CaptureFixture[str], model: Path, workloads: Path) -> None:
    asked = on(model, workloads, "--limit", "1", "--max-tokens", "4", "--drafter", "lookup")
    only = ["--only", "int8_over_fp32", "mismatches"]
    line = bench(capsys, "engine", "--quick", "--repeats", "1", *asked, *only)
    assert line["figures"].keys() == {"int8_over_fp32", "mismatches"}
    assert not any(name.startswith("transformers") for name in line["details"][str(model)]["rates"])


def test_figures_that_cannot_be_measured_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch" in fails(capsys, "engine", "--only", "nosuch")
    assert "--peers" in fails(capsys, "engine", "--only", "spec_over_hf")
    with pytest.raises(ConfigError, match="max_tokens"):
        EngineOptions(max_tokens=1)


def test_the_headline_is_of_the_model_it_is_worst_for() -> None:
    values = {"a": 1.0, "b": 2.0, "qwen2.5-coder-0.5b": 3.0}
    reports = {name: ModelReport({key: Spread.of([value]) for key in BARS}) for name, value in values.items()}
    worst = {key: spread.median for key, spread in headline(reports).items()}
    assert worst["verify4_over_plain1"] == 3.0
    assert worst["plain_over_hf"] == 1.0
    assert worst["int8_over_fp32"] == 3.0
    assert worst["mismatches"] == 6.0


def test_transformers_gives_our_tokens_in_every_mode_behind_rows_computed_before(tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model", seed=3)
    ours = OurSide(Target.load(folder), end_ids=END)
    stock, assistant = (load_stock(folder, dtype=torch.float32) for _ in range(2))
    side = PeerSide(stock, end_ids=END)
    peers = peer_contenders(side, assistant=assistant)
    for ids in (PROMPT, (40,), tuple(range(20, 90))):
        ours.prefill(ids)
        side.prefill(ids)
        expected = ours.run(ids, NullDrafter(), max_tokens=24)
        runs = {peer.name: peer.decode(ids, 24) for peer in peers}
        assert {name: run.tokens for name, run in runs.items()} == dict.fromkeys(
            (PEER_PLAIN, *lookup_names(), ASSISTED), expected.tokens
        )
        assert runs[PEER_PLAIN].num_passes == expected.num_passes
        assert runs[ASSISTED].num_passes < expected.num_passes  # the model is its own assistant


def test_what_ours_and_transformers_generate_ends_at_the_same_end_token(tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model", seed=3)
    free = OurSide(Target.load(folder), end_ids=frozenset())
    text = free.run(PROMPT, NullDrafter(), max_tokens=24).tokens
    end = next(token for i, token in enumerate(text) if i > 3 and token not in text[:i])
    ours = OurSide(free.target, end_ids=frozenset([end]))
    side = PeerSide(load_stock(folder, dtype=torch.float32), end_ids=frozenset([end]))
    side.prefill(PROMPT)
    wanted = text[: text.index(end) + 1]
    assert ours.run(PROMPT, NullDrafter(), max_tokens=24).tokens == wanted
    for peer in peer_contenders(side):
        assert peer.decode(PROMPT, 24).tokens == wanted


def test_a_rate_counts_what_was_decoded_behind_the_first_pass() -> None:
    run = Run.of(10.0, [(14.0, [1]), (15.0, [2, 3, 4]), (16.0, [5])])
    assert (run.num_decoded, run.num_passes, run.first_seconds, run.decode_seconds) == (4, 2, 4.0, 2.0)
    slow = Run.of(0.0, [(1.0, [1]), (5.0, [2, 3])])
    laps = [Lap("fast", 0, "tool", 0, 4.0, run), Lap("slow", 0, "tool", 0, 1.0, slow)]
    results = Results(laps)
    assert results.rates("fast") == [2.0]
    assert results.rates("fast", is_end_to_end=True) == [0.5]
    assert results.ratio("fast", "slow") == Spread(4.0, 4.0, 4.0)
    assert results.tau("fast") == 2.0
    with pytest.raises(ConfigError, match="prose"):
        results.ratio("fast", "slow", ["prose"])


def test_contenders_take_turns_behind_one_prefill_of_each_side() -> None:
    events: list[str] = []

    class Recorder:
        def prefill(self, ids: Sequence[int]) -> float:
            events.append("prefill")
            return 1.0

    def decode_as(name: str) -> Any:
        def decode(ids: Sequence[int], max_tokens: int) -> Run:
            events.append(f"{name}{max_tokens}")
            return Run.of(0.0, [(1.0, [1]), (2.0, [2])])

        return decode

    side = Recorder()
    contenders = [Contender(name, side, decode_as(name)) for name in "ab"]
    prompts = [RecordedPrompt("s", turn, "f", "tool", (1, 2)) for turn in range(2)]
    results = contest(contenders, prompts, max_tokens=9, num_rounds=2)
    assert events == ["prefill", "a8", "b8", *["a9", "b9"] * 2, "prefill", *["a9", "b9"] * 2]
    assert len(results.laps) == 8


def test_a_prompt_is_decoded_from_the_rows_that_are_there(llama: Target) -> None:
    side = OurSide(llama, end_ids=frozenset())
    fresh = OurSide(llama, end_ids=frozenset())
    side.prefill(PROMPT)
    assert side.state.num_rows == len(PROMPT) - 1
    expected = fresh.run(PROMPT, NullDrafter(), max_tokens=12).tokens
    for drafter in (NullDrafter(), LookupDrafter(min_match=1), NullDrafter()):
        assert side.run(PROMPT, drafter, max_tokens=12).tokens == expected
    longer = (*PROMPT, 7, 8, 9)
    side.extend(longer)
    assert side.run(longer, NullDrafter(), max_tokens=6).tokens == fresh.run(longer, NullDrafter(), max_tokens=6).tokens


def accept_all(logits: torch.Tensor, draft: Sequence[int], *arguments: Any, **options: Any) -> Verdict:
    """Verify as an engine would that has forgotten to."""
    if not draft:
        return verify(logits, draft, *arguments, **options)
    return Verdict((*draft, int(logits[-1].argmax())), len(draft))


def test_an_exact_engine_has_no_mismatches_and_a_restart_goes_on(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exact.jsonl"
    asked = on(model, workloads, "--max-tokens", "8", "--drafter", "lookup", "--out", out)
    first = bench(capsys, "exact", *asked, "--limit", "1")
    assert first["figures"]["turns"] == 3
    assert first["figures"]["mismatches"] == 0
    with out.open("a") as file:
        file.write('{"configuration": {"half a li')
    kept = out.read_text().splitlines()[0]
    capsys.readouterr()
    assert main(["bench", "exact", *map(str, asked)]) == 0
    output = capsys.readouterr()
    assert "sums/0" not in output.err
    assert "sums/1" in output.err
    assert "sums/2" in output.err
    figures = json.loads(output.out.strip().splitlines()[-1])["figures"]
    assert figures["turns"] == 9
    assert figures["tokens"] <= 9 * 2 * 8
    assert out.read_text().splitlines()[0] == kept
    assert main(["bench", "exact", *map(str, asked)]) == 0
    output = capsys.readouterr()
    assert "sums/" not in output.err
    assert json.loads(output.out.strip().splitlines()[-1])["figures"] == figures


def test_a_verification_that_accepts_everything_is_found_out(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "verify", accept_all)
    line = bench(capsys, "exact", "--model", model, "--workloads", workloads, "--max-tokens", "24", code=1)
    found = line["details"][str(model)]["mismatches"]
    assert line["figures"]["mismatches"] == len(found) > 0
    assert {mismatch["mode"] for mismatch in found} == {"greedy", "seeded"}
    for mismatch in found:
        assert mismatch["expected"] != mismatch["got"]
        assert 0 < mismatch["position"] < 24
        assert mismatch["gap"] is None or mismatch["gap"] >= 0
        assert mismatch["session"].startswith("sums/")


def test_the_contest_finds_it_out_too(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "verify", accept_all)
    asked = on(model, workloads, "--limit", "2", "--max-tokens", "24", "--repeats", "1")
    line = bench(capsys, "engine", *asked, "--only", "mismatches")
    found = line["details"][str(model)]["mismatches"]
    assert line["figures"]["mismatches"] == len(found)
    assert {mismatch["mode"] for mismatch in found} == {"greedy, ours lookup", "seeded"}


def test_prompts_that_leave_no_room_are_counted_as_skipped(
    capsys: pytest.CaptureFixture[str], model: Path, workloads: Path
) -> None:
    line = bench(capsys, "exact", "--model", model, "--workloads", workloads, "--limit", "1", "--max-tokens", "400")
    assert line["figures"]["skipped"] > 0
    assert line["figures"]["skipped"] + line["figures"]["turns"] == 3


def test_the_gap_is_between_the_two_best_of_what_is_drawn_from() -> None:
    target = tiny_target("qwen3", max_position_embeddings=1024)
    ids = list(PROMPT) * 25  # more than one chunk
    logits = target.forward(ids, target.new_cache()).logits[-1]
    best, second = logits.sort(descending=True).values[:2].tolist()
    gap = gap_between_best(target, ids, GREEDY)
    assert gap == pytest.approx(best - second, abs=1e-4)
    seeded = sampling_modes(7)["seeded"]
    kept, log_p = kept_tokens(logits, seeded)
    scores = (log_p + gumbel_noise(kept, seed=7, position=len(ids))).sort(descending=True).values
    assert gap_between_best(target, ids, seeded) == pytest.approx(float(scores[0] - scores[1]), abs=1e-4)
    assert gap_between_best(target, ids, SamplingParams(1.0, top_k=1)) is None


def test_the_first_difference_is_where_texts_part_or_one_has_ended(llama: Target) -> None:
    assert first_difference(llama, PROMPT, [1, 2, 3], [1, 2, 3], sampling=GREEDY) is None
    parted = first_difference(llama, PROMPT, [1, 2, 3], [1, 4, 3], sampling=GREEDY)
    assert parted is not None
    assert (parted.position, parted.expected, parted.got) == (1, 2, 4)
    assert parted.gap == pytest.approx(gap_between_best(llama, [*PROMPT, 1], GREEDY))
    ended = first_difference(llama, PROMPT, [1, 2], [1, 2, 3], sampling=GREEDY)
    assert ended is not None
    assert (ended.position, ended.expected, ended.got) == (2, None, 3)


def test_the_journal_of_another_configuration_is_not_taken(tmp_path: Path, llama: Target) -> None:
    path = tmp_path / "journal.jsonl"
    comparison = Comparison(llama, LookupDrafter(), END, max_tokens=4)
    num_tokens, found = comparison.prompt(comparison.sides(), PROMPT)
    assert 0 < num_tokens <= 8
    assert found == []
    mismatch = first_difference(llama, PROMPT, [1], [2], sampling=GREEDY)
    assert mismatch is not None
    report = SessionReport("s", 1, num_tokens, 0, (mismatch,))
    Journal(path, {"seed": 1, "drafters": ("a", "b")}).add(asdict(report))
    assert finished_sessions(Journal(path, {"seed": 1, "drafters": ("a", "b")})) == {"s": report}
    assert finished_sessions(Journal(path, {"seed": 2, "drafters": ("a", "b")})) == {}


def test_the_attention_is_timed_and_left_as_it_was() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    target = tiny_target("llama", max_position_embeddings=2048)
    name = target.model.config._attn_implementation
    before = ALL_ATTENTION_FUNCTIONS[name]
    cache = target.new_cache()
    passes.fill(target, cache, 1500)
    assert cache.num_rows == 1500
    one = passes.timed_pass(target, cache, 1)
    assert 0 < one.attention_ms < one.total_ms
    assert cache.num_rows == 1500
    assert ALL_ATTENTION_FUNCTIONS[name] is before


def test_concurrent_sessions_all_get_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    seen: list[int] = []

    def counting(target: Target, decodings: Sequence[Any], planner: Any) -> Any:
        seen.append(len(decodings))
        return decoding.run_pass(target, decodings, planner)

    monkeypatch.setattr("dlite_agent.engine.scheduler.run_pass", counting)
    prompts = [(number, 2, 3, number) for number in range(passes.NUM_SESSIONS)]
    spread = passes.concurrent_over_one(target, NullDrafter(), prompts, max_tokens=10, num_rounds=2)
    assert 0 < spread.min <= spread.median <= spread.max
    assert max(seen) == passes.NUM_SESSIONS
    assert sum(seen) == 3 * (passes.NUM_SESSIONS + 1) * 10


@pytest.mark.skipif(not memory.is_measurable(), reason="this system does not count a process's peak memory")
def test_the_memory_of_a_prefill_counts_its_rows_apart(model: Path, tmp_path: Path) -> None:
    whole, tail = (
        memory.prefill_extra(model, num_tokens=600, num_skipped=skipped, num_threads=1, home=tmp_path)
        for skipped in (0, 300)
    )
    bytes_per_row = 4 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    assert whole.kv == tail.kv == 600 * bytes_per_row
    for used in (whole, tail):
        assert used.peak >= used.before > 100e6
        assert used.extra_mb == (used.peak - used.before - used.kv) / 1e6


def test_a_process_that_measures_memory_and_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(DLiteError, match=r"config\.json"):
        memory.prefill_extra(tmp_path, num_tokens=8, num_skipped=0, num_threads=1, home=tmp_path)


def test_the_cost_of_a_pass_is_measured_with_each_kind_of_products(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    assert main(["bench", "verify", "--model", str(model), "--context", "16", "--repeats", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    names = {f"{kind}_{rows}_over_1" for kind in ("ours", "stock", "exact") for rows in ROWS}
    assert set(figures) == names
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in figures.values())


def test_stock_products_are_those_of_transformers() -> None:
    stock = with_stock_products(tiny_target("llama"))
    kinds = [type(module) for module in stock.model.modules() if isinstance(module, nn.Linear | SmallRowLinear)]
    assert set(kinds) == {nn.Linear}
    logits = stock.forward(list(PROMPT), stock.new_cache(), num_logits=len(PROMPT)).logits
    ours = tiny_target("llama")
    expected = ours.forward(list(PROMPT), ours.new_cache(), num_logits=len(PROMPT)).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4)
