"""SQL for reading and, where allowed, for writing: what comes back."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from dlite_agent.errors import ConfigError
from dlite_agent.tools import database_tool


@pytest.fixture(params=["delete", "wal"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "data" / "a b?#%.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {request.param}")
        connection.execute("CREATE TABLE people (name TEXT, age REAL, photo BLOB)")
        connection.execute("INSERT INTO people VALUES ('Ann\nLee', 4.5, x'00ff'), (NULL, 7, NULL)")
        connection.execute("CREATE TABLE numbers (n)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(number,) for number in range(250)])
        connection.commit()
    return path


def run(tool: BaseTool, sql: str) -> ToolMessage:
    message = tool.invoke({"type": "tool_call", "id": "1", "name": "query_database", "args": {"sql": sql}})
    assert isinstance(message, ToolMessage)
    return message


def test_rows_come_back_one_a_line(path: Path) -> None:
    tool = database_tool(path)
    assert run(tool, "SELECT * FROM people").content == (
        "name | age | photo\nAnn\\nLee | 4.5 | (2 bytes)\nNULL | 7.0 | NULL\n(2 rows)"
    )
    assert "CREATE TABLE people" in run(tool, "SELECT name, sql FROM sqlite_master").content
    assert "0 | name | TEXT" in run(tool, "PRAGMA table_info(people)").content
    assert os.listdir(path.parent) == [path.name]


def test_many_rows_are_read_in_pages(path: Path) -> None:
    tool = database_tool(path)
    first = str(run(tool, "SELECT n FROM numbers ORDER BY n").content).splitlines()
    assert first[0] == "n"
    assert first[1:-1] == [str(number) for number in range(100)]
    assert first[-1] == "(first 100 rows; see more with LIMIT and OFFSET 100)"
    last = str(run(tool, "SELECT n FROM numbers ORDER BY n LIMIT 100 OFFSET 200").content).splitlines()
    assert last[-2:] == ["249", "(50 rows)"]


def test_mistakes_are_one_line(path: Path) -> None:
    tool = database_tool(path)
    for sql, problem in (("SELEC 1", "syntax error"), ("SELECT * FROM nobody", "no such table"), (" ", "is empty")):
        message = run(tool, sql)
        assert message.status == "error"
        assert problem in str(message.content)
        assert "\n" not in str(message.content)


def test_a_writable_database_is_written_and_others_see_it(path: Path) -> None:
    tool = database_tool(path, is_writable=True)
    assert run(tool, "INSERT INTO numbers VALUES (1000), (1001)").content == "done (2 rows changed)"
    assert run(tool, "CREATE TABLE notes (text)").content == "done"
    assert run(tool, "DELETE FROM people RETURNING age").content == "age\n4.5\n7.0\n(2 rows)"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT max(n) FROM numbers").fetchall() == [(1001,)]
        assert connection.execute("SELECT count(*) FROM people").fetchall() == [(0,)]


def test_a_reader_works_beside_a_writer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("INSERT INTO numbers VALUES (5000)")
        writer.commit()
        assert "5000" in run(database_tool(path), "SELECT max(n) FROM numbers").content


async def test_it_is_asked_asynchronously(path: Path) -> None:
    call = {"type": "tool_call", "id": "1", "name": "query_database", "args": {"sql": "SELECT 1 AS one"}}
    assert (await database_tool(path).ainvoke(call)).content == "one\n1\n(1 row)"


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        database_tool(tmp_path / "missing.db")
    (tmp_path / "text.db").write_text("hello" * 1000)
    assert "file is not a database" in str(run(database_tool(tmp_path / "text.db"), "SELECT 1").content)
