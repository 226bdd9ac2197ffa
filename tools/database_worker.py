"""Runs one SQL statement and prints its rows; a program of its own, started by `dlite_agent.tools.database`."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

_READ = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_WRITE = {
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX,
    sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_REINDEX,
}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
_BOUNDS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 16_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 20,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_MAX_CELL_CHARS = 300


def main() -> None:
    """Read the arguments from standard input as JSON; an error is one line and exit status 1."""
    arguments = json.load(sys.stdin)
    started = time.monotonic()
    try:
        connection = _open(arguments["path"], is_writable=arguments["is_writable"])
        _confine(connection, is_writable=arguments["is_writable"])
        connection.set_progress_handler(lambda: time.monotonic() - started > arguments["seconds"], 10_000)
        if not arguments["sql"].strip():
            sys.exit("the statement is empty; give one such as SELECT name, sql FROM sqlite_master")
        cursor = connection.execute(arguments["sql"])
        text = _table(cursor, arguments["max_rows"], arguments["max_chars"])
        connection.commit()
    except MemoryError:
        sys.exit("the query needs too much memory; use WHERE or LIMIT")
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        sys.exit(_explain(str(error), arguments["seconds"], is_writable=arguments["is_writable"]))
    print(text)


def _open(path: str, *, is_writable: bool) -> sqlite3.Connection:
    uri = Path(path).as_uri()
    try:
        return _connect(f"{uri}?mode={'rw' if is_writable else 'ro'}")
    except sqlite3.OperationalError:
        # A database that was closed in WAL mode needs files beside it that may not be made here.
        if is_writable or Path(f"{path}-wal").exists():
            raise
        return _connect(f"{uri}?mode=ro&immutable=1")


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    return connection


def _confine(connection: sqlite3.Connection, *, is_writable: bool) -> None:
    if not is_writable:
        connection.execute("PRAGMA query_only = ON")
    for limit, value in _BOUNDS.items():
        connection.setlimit(limit, value)
    allowed = _READ | _WRITE if is_writable else _READ

    def authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            is_allowed = (second or "").lower() not in _REFUSED_FUNCTIONS
        elif action == sqlite3.SQLITE_PRAGMA:
            is_allowed = (first or "").lower() in _PRAGMAS
        else:
            is_allowed = action in allowed
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    connection.set_authorizer(authorize)


def _explain(message: str, seconds: float, *, is_writable: bool) -> str:
    if message == "interrupted":
        return f"the query takes longer than {seconds:g} seconds; use WHERE or LIMIT"
    if not any(word in message for word in ("not authorized", "authorization denied", "prohibited")):
        return f"SQL error: {message}"
    allowed = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER and DROP" if is_writable else "SELECT"
    return f"refused ({message}); only {allowed} is allowed, and PRAGMA table_info"


def _table(cursor: sqlite3.Cursor, max_rows: int, max_chars: int) -> str:
    """Return the rows, one a line, and how many there are or how to see more."""
    if cursor.description is None:
        return f"done ({cursor.rowcount} rows changed)" if cursor.rowcount >= 0 else "done"
    lines = [" | ".join(column[0] for column in cursor.description)]
    length, num_rows = len(lines[0]), 0
    for row in cursor:
        line = " | ".join(map(_cell, row))
        length += len(line) + 1
        if num_rows == max_rows or (length > max_chars and num_rows):
            return "\n".join([*lines, f"(first {num_rows} rows; see more with LIMIT and OFFSET {num_rows})"])
        lines.append(line[:max_chars])
        num_rows += 1
    return "\n".join([*lines, f"({num_rows} row{'s' * (num_rows != 1)})"])


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    text = (
        value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r") if isinstance(value, str) else str(value)
    )
    if len(text) <= _MAX_CELL_CHARS:
        return text
    return f"{text[:_MAX_CELL_CHARS]}... ({len(text)} characters; see more with substr)"


if __name__ == "__main__":
    main()
