"""Attacks on the tools, each carried out: nothing outside is read or changed, limits hold, the tool works afterwards.

The attacks are lines of the tables in `bench.agent.attacks`, which `dlite-agent bench agent` carries out too. Attacks
through `fetch_page` are in test_tools_web.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tools import BaseTool, tool

from dlite_agent.bench.agent import house as houses
from dlite_agent.bench.agent.attacks import FILES, PYTHON, READ_ONLY_SQL, SQL, WRITABLE_SQL
from dlite_agent.bench.agent.house import ROOMY, SECRET, SHORT, House, built, call, database_seconds, is_confined
from dlite_agent.tools import database_tool, default_tools, note_tools, python_tool


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with built(tmp_path) as made:
        yield made


def attack(house: House, tool: BaseTool, arguments: dict[str, Any], expected: str) -> None:
    assert houses.attack(house, tool, arguments, expected) == ([], "")


@pytest.mark.parametrize(("name", "arguments", "expected"), [pytest.param(*line[1:], id=line[0]) for line in FILES])
def test_an_attack_on_files_notes_and_the_rest(
    house: House, name: str, arguments: dict[str, Any], expected: str
) -> None:
    house.plant()
    tools = {tool.name: tool for tool in [*default_tools(house.work), *note_tools(house.notes)]}
    attack(house, tools[name], arguments, expected)
    assert call(tools["read_file"], {"path": "a.txt"}).content == "fine\n"
    assert call(tools["write_file"], {"path": "new.txt", "content": "x"}).status == "success"


@pytest.mark.skipif(not is_confined(), reason="needs Linux with Landlock and seccomp filters")
@pytest.mark.parametrize(("code", "expected"), [pytest.param(*line[1:], id=line[0]) for line in PYTHON])
def test_an_attack_by_a_program(house: House, code: str, expected: str) -> None:
    os.symlink(house.out / "secret.txt", house.work / "link")
    tool = python_tool(house.work, limits=SHORT if "stopped after" in expected else ROOMY)
    attack(house, tool, {"code": code}, expected)
    assert sum(file.lstat().st_size for file in house.work.iterdir()) < 900 << 20
    assert call(tool, {"code": "print(open('a.txt').read(), end='')\n6 * 7"}).content == "fine\n42"


@pytest.mark.parametrize(("sql", "expected"), [pytest.param(*line[1:], id=line[0]) for line in SQL + READ_ONLY_SQL])
def test_an_attack_by_sql_that_may_read(house: House, sql: str, expected: str) -> None:
    tool = database_tool(house.database, timeout_s=database_seconds(expected))
    attack(house, tool, {"sql": sql}, expected)
    assert os.listdir(house.database.parent) == ["people.db"]
    assert call(tool, {"sql": "SELECT * FROM people"}).content == "name | age\nAnn | 41\n(1 row)"


@pytest.mark.parametrize(("sql", "expected"), [pytest.param(*line[1:], id=line[0]) for line in SQL[:7] + WRITABLE_SQL])
def test_an_attack_by_sql_that_may_write(house: House, sql: str, expected: str) -> None:
    tool = database_tool(house.database, is_writable=True, timeout_s=database_seconds(expected))
    attack(house, tool, {"sql": sql}, expected)
    assert call(tool, {"sql": "INSERT INTO people VALUES ('Bo', 7)"}).content == "done (1 rows changed)"
    assert "(2 rows)" in call(tool, {"sql": "SELECT * FROM people"}).content


def test_an_escape_is_found(house: House) -> None:
    def leak(path: str) -> str:
        """Read any file, and leave something behind."""
        (house.out / "new.txt").write_text("x")
        return Path(path).read_text()

    escaped, answer = houses.attack(house, tool(leak), {"path": "{out}/secret.txt"}, "outside the workspace")
    assert escaped == ["the answer holds the secret", "something outside was changed"]
    assert answer == SECRET
