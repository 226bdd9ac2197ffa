"""Every kind of crash, once or twice, by the benchmark's own harness; and the harness finds what it is to find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis

from dlite_agent.bench.journal import Journal
from dlite_agent.bench.sessions import matrix
from dlite_agent.bench.sessions.measure import SessionOptions
from dlite_agent.bench.sessions.proxy import Proxy
from dlite_agent.bench.sessions.servers import ScratchServer, running
from dlite_agent.bench.sessions.soak import SoakOptions, SoakReport, soak
from dlite_agent.bench.sessions.trial import Lab, Trial, TrialReport
from dlite_agent.cli import main
from dlite_agent.errors import ConfigError
from dlite_agent.sessions.embedded import find_server

_TWICE = ("connection-cut", "head-damaged", "replies-stale", "server-killed", "record-swapped")
_RUNS = [(kind, seed) for kind in matrix.KINDS for seed in ((2, 5) if kind in _TWICE else (5,))]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running((find_server(),)) as servers:
        yield Lab(servers, tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(("kind", "seed"), _RUNS)
def test_a_crash_costs_time_or_a_typed_error_and_never_a_token_or_a_session(lab: Lab, kind: str, seed: int) -> None:
    report = matrix.run_trial(lab, kind, seed)
    assert report.is_fine, "\n".join(matrix.describe(report))
    assert report.note
    assert report.counters["committed"]


def test_a_wrong_text_a_lost_turn_and_a_broken_session_are_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(trial: Trial) -> None:
        trial.converse(trial.keeper())
        trial.acknowledged.append("0" * 64)
        trial.check_kept()
        prompt = [1, 2, 3]
        lab.cold(prompt, 4)[0] += 1
        monkeypatch.setattr(trial.random, "randint", lambda low, high: 4)
        trial.turn(trial.keeper(), prompt)
        raise RuntimeError("broken")

    monkeypatch.setitem(matrix.KINDS, "spoiled", spoil)
    report = matrix.run_trial(lab, "spoiled", 0)
    assert (len(report.wrong), len(report.unusable), len(report.lost)) == (1, 1, 1)
    assert "broken" in report.unusable[0]
    figures = matrix.figures([report])
    assert figures == {"crash_runs": 1, "crash_wrong": 1, "crash_unusable": 1, "crash_lost": 1}
    assert "--kind spoiled --seed 0 --runs 1" in "\n".join(matrix.describe(report))


def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    said: list[str] = []
    done = TrialReport("tenants", 3, "a server", (), ("it was odd",), (), (), {"hits": 1}, "a note")
    journal = Journal(tmp_path / "journal", {})
    journal.add(asdict(done))
    reports = matrix.run_matrix(
        (find_server(),), kinds=["tenants"], num_runs=2, seed=3, journal=journal, say=said.append
    )
    assert reports[0] == done
    assert (reports[1].kind, reports[1].seed) == ("tenants", 4)
    assert [report["seed"] for report in journal.reports()] == [3, 4]


def test_a_proxy_repeats_a_reply_where_it_is_told_to() -> None:
    with ScratchServer(find_server()) as server, Proxy(server.socket) as proxy:
        client = server.client()
        client.connection_pool.connection_kwargs["path"] = proxy.socket
        client.mset({"a": b"a" * 600, "b": b"b" * 600, "c": b"c" * 600})
        proxy.shift_at = 1
        pipe = client.pipeline(transaction=False)
        for key in "abc":
            pipe.get(key)
        assert [bytes(reply[:1]) for reply in pipe.execute()] == [b"a", b"a", b"b"]
        client.close()
        proxy.stale_at = 1
        with redis.Redis(unix_socket_path=proxy.socket) as other:
            other.get("a")
        assert proxy.num_faults == 2


def test_a_short_soak_loses_nothing() -> None:
    report = soak(SoakOptions(minutes=0.1, num_sessions=8, num_workers=2), find_server(), say=lambda text: None)
    assert (report.wrong, report.lost, report.errors) == ([], [], [])
    assert report.num_turns > 0
    assert report.num_kills > 0


def test_memory_that_grows_is_seen() -> None:
    flat = SoakReport(samples=[(float(at), 100, 200) for at in range(40)])
    growing = SoakReport(samples=[(float(at), 100, 200 + 10 * at) for at in range(40)])
    assert flat.memory_growth() == 1.0
    assert (growing.memory_growth() or 0.0) > 1.1
    assert SoakReport(num_sessions=2, num_ended=1, samples=growing.samples).memory_growth() is None


@pytest.mark.usefixtures("command_home")
def test_the_command_prints_a_table_and_a_line_of_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "sessions", "--only", "crash", "--kind", "tenants", "--kind", "head-damaged", "--runs", "2"]
    assert main([*command, "--out", str(tmp_path / "journal"), "--json", str(tmp_path / "line")]) == 0
    printed = capsys.readouterr().out
    line: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    assert line["bench"] == "sessions"
    assert line["figures"] == {"crash_runs": 2, "crash_wrong": 0, "crash_unusable": 0, "crash_lost": 0}
    assert line["details"]["counters"]["tenants"]["runs"] == 1
    assert "crash_wrong" in printed
    assert "holds" in printed
    assert json.loads((tmp_path / "line").read_text()) == line


def test_an_unknown_part_or_scenario_is_refused() -> None:
    with pytest.raises(ConfigError, match="sock"):
        SessionOptions(only=("sock",))
    with pytest.raises(ConfigError, match="worker-killed"):
        SessionOptions(kinds=("worker",))
    with pytest.raises(ConfigError, match="soak_minutes"):
        SessionOptions(soak_minutes=0)


@pytest.mark.parametrize("fsync", ["everysec", "always"])
def test_a_scratch_server_comes_back_with_its_data(fsync: Any) -> None:
    with ScratchServer(find_server(), fsync=fsync) as server:
        with server.client() as client:
            client.set("key", b"value")
        server.kill()
        server.start()
        with server.client() as client:
            assert client.get("key") == b"value"
            assert client.config_get("appendfsync")["appendfsync"] == fsync
