"""What is measured is never trained on."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dlite_agent.errors import ConfigError
from dlite_agent.train.recordings import training_sessions
from dlite_agent.train.split import HELD_OUT_SHARE, held_out_groups, read_groups, read_listed_ids

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"


def test_a_group_with_a_measured_session_is_held_out_whole() -> None:
    groups = {f"{variant}/{n}": f"task/{n}" for n in range(200) for variant in ("a", "b")}
    held_out = held_out_groups(groups, ["b/3", "a/50"])
    assert {"task/3", "task/50"} <= held_out
    share = len(held_out) / 200
    assert HELD_OUT_SHARE / 2 < share < 2.5 * HELD_OUT_SHARE


def test_the_choice_does_not_depend_on_what_else_there_is() -> None:
    groups = {str(n): f"task/{n}" for n in range(400)}
    few = {name: group for name, group in groups.items() if int(name) % 3 == 0}
    assert held_out_groups(few, []) == held_out_groups(groups, []) & set(few.values())


def test_a_measured_session_that_nobody_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'gone'"):
        held_out_groups({"a": "a"}, ["gone"])


@pytest.mark.parametrize("content", ["{", "[1]", '{"smoke": 3}'])
def test_unreadable_lists_are_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "subsets.json").write_text(content)
    with pytest.raises(ConfigError, match=r"subsets\.json"):
        read_listed_ids(tmp_path)


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the shared workloads are not beside this clone")
def test_the_workloads_sides_share_no_group_and_leave_out_nothing() -> None:
    train, held_out = training_sessions(WORKLOADS), training_sessions(WORKLOADS, is_held_out=True)
    groups = read_groups(WORKLOADS)
    assert not {s.group for s in train} & {s.group for s in held_out}
    assert {s.id for s in train} | {s.id for s in held_out} == set(groups)
    listed = {name for ids in json.loads((WORKLOADS / "subsets.json").read_text()).values() for name in ids}
    assert listed <= {s.id for s in held_out}
    assert all(session.group == groups[session.id] for session in (*train, *held_out))
    assert len(held_out) < len(train) / 3


@pytest.mark.skipif(not WORKLOADS.is_dir(), reason="the shared workloads are not beside this clone")
def test_the_order_is_the_seeds_and_neighbours_share_their_tools() -> None:
    order = [session.id for session in training_sessions(WORKLOADS, seed=1)]
    assert order == [session.id for session in training_sessions(WORKLOADS, seed=1)]
    assert order != [session.id for session in training_sessions(WORKLOADS, seed=2)]
    sessions = training_sessions(WORKLOADS)
    alike = sum(a.prefix_key == b.prefix_key for a, b in pairwise(sessions))
    assert alike > len(sessions) / 2
