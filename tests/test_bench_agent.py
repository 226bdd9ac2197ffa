"""The agent benchmark on random weights: every figure is there, and each measurement finds what it is to find."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent import ChatDLite, RedisSaver, Settings
from dlite_agent.agent.invalid_calls import InvalidCallRetry
from dlite_agent.bench.agent import kills, malformed, oracle
from dlite_agent.bench.agent.equal import ReplayReport, replay_all, replay_twice
from dlite_agent.bench.agent.measure import AgentOptions, measure
from dlite_agent.bench.agent.race import StockChatModel, long_session, num_calls
from dlite_agent.bench.agent.replay import ReplayedCall
from dlite_agent.bench.agent.sessions import dev_sessions, split_turns
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.peers import load_stock
from dlite_agent.cli import main
from dlite_agent.environments import LiveTask, live
from dlite_agent.environments.installed import BFCL
from dlite_agent.environments.state import EndState
from dlite_agent.errors import ConfigError, MissingDependencyError
from dlite_agent.recorded import RecordedSession
from dlite_agent.runtime import close_all
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.testing import write_tiny_chat_model

pytestmark = pytest.mark.usefixtures("command_home")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def adding(id: str, a: int) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "add", "args": {"a": a}, "id": id}])


SESSION = RecordedSession(
    "made/1",
    (
        SystemMessage("Be brief."),
        AIMessage("Hello."),
        HumanMessage("Add one."),
        adding("1", 1),
        ToolMessage("1", tool_call_id="1", name="add"),
        adding("2", 1),
        ToolMessage("2", tool_call_id="2", name="add"),
        HumanMessage("Wait."),
        HumanMessage("And now?"),
        AIMessage("Two."),
    ),
    (ADD,),
    {},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "model"
    return write_tiny_chat_model(path, max_position_embeddings=32_768, num_hidden_layers=2)


@pytest.fixture
def chats(folder: Path) -> Iterator[list[ChatDLite]]:
    settings = Settings(home=folder.parent / "home", threads=1, offline=True)
    yield [ChatDLite(model=str(folder), drafter=d, max_tokens=8, settings=settings) for d in ("null", "lookup")]
    close_all()


def test_turns_end_where_the_user_speaks_and_hold_what_the_graph_is_given() -> None:
    first, second = split_turns(SESSION)
    assert [message.text for message in first.given] == ["Hello.", "Add one."]
    assert (len(first.replies), sorted(first.results)) == (2, ["1", "2"])
    assert [message.text for message in second.given] == ["Wait.", "And now?"]
    assert [message.text for message in second.replies] == ["Two."]
    assert num_calls(SESSION, 20) == 3 and num_calls(SESSION, 1) == 1
    later = replace(SESSION, added_tools={7: ("add",)})
    assert [len(turn.tools) for turn in split_turns(later)] == [0, 1]


def test_a_replay_follows_the_record_reuses_every_token_and_is_equal(chats: list[ChatDLite]) -> None:
    report = replay_twice(SESSION, *chats, max_prompt=10_000)
    assert (report.calls, report.append_only, report.differing) == (3, 3, ())
    assert report.beyond <= 1
    assert report.num_prefilled < report.num_prompt
    assert ReplayReport.from_dict(json.loads(json.dumps(asdict(report)))) == report


def test_a_replay_ends_where_prompts_are_too_long(chats: list[ChatDLite]) -> None:
    long = replace(SESSION, messages=(*SESSION.messages, HumanMessage("x" * 4000), AIMessage("Fine.")))
    assert replay_twice(long, *chats, max_prompt=3000).calls == 3


def test_another_text_and_a_token_computed_twice_are_found() -> None:
    call = ReplayedCall("a", 1, num_prompt=10, num_prefilled=5, num_beyond=0, is_append_only=True)
    report = ReplayReport.of("s", [call, call], [replace(call, raw="b"), replace(call, num_beyond=3)])
    assert report.differing == ((0, "a", "b"),)
    assert report.beyond == 3
    assert ReplayReport.of("s", [call], []).differing == ((-1, "1 calls", "0 calls"),)


def test_finished_replays_are_not_repeated(tmp_path: Path, chats: list[ChatDLite]) -> None:
    done = ReplayReport("made/1", 3, 9, 5, 3, 3, 0, ((0, "x", "y"),))
    journal = Journal(tmp_path / "journal", {})
    journal.add(asdict(done))
    said: list[str] = []
    options: dict[str, Any] = {"num_sessions": 2, "max_prompt": 10_000, "journal": journal, "say": said.append}
    other = replace(SESSION, id="made/2")
    reports = replay_all([SESSION, other, replace(SESSION, id="made/3")], *chats, **options)
    assert [report.session for report in reports] == ["made/1", "made/2"]
    assert reports[0] == done and len(said) == 1


def test_the_stock_model_says_what_ours_says_and_computes_it_all(chats: list[ChatDLite], folder: Path) -> None:
    plain = chats[0]
    stock = StockChatModel(
        model=load_stock(folder, dtype=plain.runtime.target.dtype), runtime=plain.runtime, max_tokens=8
    )
    question = [HumanMessage("Say something.")]
    assert stock.invoke(question).text == plain.invoke(question).text
    assert stock.num_generated > 0


def test_the_long_session_is_the_shortest_that_is_long_enough(chats: list[ChatDLite]) -> None:
    longer = replace(SESSION, id="longer", messages=(*SESSION.messages, HumanMessage("x" * 500), AIMessage("Yes.")))
    assert long_session([longer, SESSION], chats[0], calls=3, room=10_000).id == "made/1"
    assert long_session([SESSION, longer], chats[0], calls=4, room=10_000).id == "longer"
    assert long_session([SESSION, longer], chats[0], calls=20, room=10_000).id == "longer"
    with pytest.raises(ConfigError, match="room for 10"):
        long_session([SESSION], chats[0], calls=3, room=10)


class Calculator:
    """An environment of one call, which adds to a sum."""

    names = frozenset(["add"])

    def __init__(self, facts: Any) -> None:
        self.facts = facts
        self.sum = 0

    def call(self, name: str, arguments: Any) -> str:
        self.sum += arguments["a"]
        return str(self.sum)

    def end_state(self) -> EndState:
        return EndState(self.sum == self.facts["sum"], f"the sum is {self.sum}")


def test_a_result_or_an_end_that_is_not_the_recorded_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(live._KINDS, "sums", Calculator)
    wrong = list(SESSION.messages)
    wrong[6] = ToolMessage("3", tool_call_id="2", name="add")
    tasks = [
        LiveTask("sums", SESSION, {"sum": 2}),
        LiveTask("sums", replace(SESSION, id="made/2", messages=tuple(wrong)), {"sum": 3}),
    ]
    said: list[str] = []
    journal = Journal(tmp_path / "journal", {})
    fine, other = oracle.run_oracles(tasks, journal=journal, say=said.append)
    assert (fine.calls, fine.equal, fine.is_end_equal) == (2, 2, True)
    assert (other.equal, other.is_end_equal, other.differing) == (1, False, ("add", "3", "2"))
    assert oracle.equal_percent([fine, other]) == 75
    assert [said_of.split(":")[0] for said_of in said] == ["made/2"]
    assert oracle.run_oracles(tasks, journal=journal, say=said.append) == [fine, other]
    assert len(list(journal.reports())) == 2


@pytest.mark.slow
def test_killed_agents_are_resumed_and_repeat_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "journal", {})
    reports = kills.run_kills(2, seed=7, journal=journal, say=said.append)
    assert [report.faults for report in reports] == [(), ()]
    assert all(report.is_resumed for report in reports)
    assert kills.run_kills(2, seed=7, journal=journal, say=said.append) == reports
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("where", "named"), [("start", ("__start__",)), ("input", ()), ("task", ())])
def test_a_worker_is_resumed_whatever_is_named_as_next(
    tmp_path: Path, server: EmbeddedServer, where: str, named: tuple[str, ...]
) -> None:
    class CutSaver(RedisSaver):
        is_cut = False

        def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
            saved = super().put(config, checkpoint, metadata, new_versions)
            if self.is_cut and where != "task" and metadata["source"] == "input":
                raise KeyboardInterrupt
            return saved

        def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            if self.is_cut and where == "start":
                return
            super().put_writes(config, writes, task_id, task_path)
            if self.is_cut and where == "task" and "branch:to:model" in dict(writes):
                raise KeyboardInterrupt

    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=16_384, num_hidden_layers=2)
    errand = kills.Errand(folder, server.state.socket, where, tmp_path / "runs")
    settings = Settings(home=tmp_path / "home", threads=1, offline=True)
    chat = ChatDLite(model=str(folder), max_tokens=8, settings=settings)
    saver = CutSaver(server.client(), tenant=kills._TENANT)
    config: Any = {"configurable": {"thread_id": where}}
    texts = [{"messages": [HumanMessage(text)]} for text, _ in kills.script()]
    kills._graph(chat, saver, errand, 0).invoke(texts[0], config)
    saver.is_cut = True
    second = kills._graph(chat, saver, errand, 1)
    with pytest.raises(KeyboardInterrupt):
        second.invoke(texts[1], config, durability="sync")
    assert second.get_state(config).next == named
    assert kills.employ(errand).is_done
    said_texts = [message.text for message in kills._State.read(saver, where).messages if message.type == "ai"]
    assert [text for text in said_texts if text] == ["Done: gather.", "Done: sort.", "Done: report."]
    assert kills._runs(errand.journal) == Counter(range(6))


def test_a_run_that_was_repeated_or_lost_and_a_changed_plan_are_found(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("0\n1\n1\n2")
    assert kills._runs(tmp_path / "runs") == {0: 1, 1: 2}
    assert kills._runs(tmp_path / "none") == {}
    (_, replies), *_ = kills.script()
    results = [
        ToolMessage("done", tool_call_id="plan 0", name="write_todos"),
        ToolMessage("appended 0", tool_call_id="a 0", name="append"),
    ]
    state = kills._State([HumanMessage("go"), replies[0], results[0], replies[1], results[1]], [])
    assert state.entries == [0]
    assert state.last_plan == [("gather", "in_progress"), ("sort", "pending"), ("report", "pending")] != state.todos
    assert not kills.KillReport(0, 1.0, True, 2, 9, ("run 1 was committed and repeated",)).is_resumed
    assert not kills.KillReport(0, 1.0, False, 0, 0).is_resumed


def test_an_agent_that_lets_malformed_calls_through_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert malformed.try_malformed("misspelt key").faults == ()
    monkeypatch.setattr(InvalidCallRetry, "after_model", lambda self, state, runtime: None)
    assert malformed.try_malformed("unclosed").faults


def test_held_out_sessions_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    records = [{"id": f"made/{number}", "messages": messages} for number in range(3)]
    (tmp_path / "agent" / "made.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "subsets.json").write_text(json.dumps({"smoke": ["made/1"]}))
    assert "made/1" not in [session.id for session in dev_sessions(tmp_path)]
    assert len(dev_sessions(None)) == 4
    with pytest.raises(ConfigError, match="is no folder"):
        dev_sessions(tmp_path / "nowhere")


def test_a_part_that_lacks_its_package_is_left_out_unless_it_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("bfcl_eval", "tau2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr("dlite_agent.bench.agent.measure.PARTS", ("oracle", "live"))
    options = AgentOptions(model=str(folder), num_calls=1, max_tokens=2)
    report = measure(options, settings=Settings(threads=1, offline=True))
    assert set(report.skipped) == {"bfcl oracle", "tau2 oracle", "live"}
    assert "pip install --no-deps bfcl-eval" in report.skipped["live"]
    assert set(report.figures) == {"loop_stall_ms"}
    with pytest.raises(MissingDependencyError):
        measure(replace(options, only=("oracle",)), settings=Settings(threads=1, offline=True))


def test_the_command_prints_every_figure_and_one_json_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip(f"bfcl_eval is not installed; run: {BFCL.command}")
    command = ["bench", "agent", "--quick", "--model", str(folder), "--max-prompt", "20000", "--max-tokens", "4"]
    command += ["--calls", "2", "--limit", "1", "--only", "oracle", "replay", "live", "race", "malformed"]
    assert main([*command, "--out", str(tmp_path / "journal"), "--json", str(tmp_path / "line")]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == json.loads((tmp_path / "line").read_text())
    figures = line["figures"]
    assert line["bench"] == "agent"
    assert figures["bfcl_oracle_equal"] == figures["replay_equal"] == figures["malformed_bounded"] == 100
    assert figures["bfcl_oracle_calls"] == 10 and figures["reprefill_per_turn"] <= 1
    assert figures["session20_over_hf"] > 0 and figures["session20_calls"] == 2
    assert figures["loop_stall_ms"] >= 0 and figures["live_sessions"] == 1
    assert [each["session"] for each in line["details"]["live"]] == ["bfcl_mt/base/105"]
    assert line["details"]["skipped"].keys() == {"tau2 oracle"}


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="no part 'everything'"):
        AgentOptions(only=["everything"])
