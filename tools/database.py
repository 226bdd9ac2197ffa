"""SQL on one SQLite file, by default for reading only.

The query runs in a confined process, because SQLite can be stopped between two of its operations only: one `LIKE` with
enough wildcards, on one long text, takes years.
"""

from __future__ import annotations

import math
from pathlib import Path

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field

from dlite_agent.errors import ConfigError
from dlite_agent.tools.factory import make_tool
from dlite_agent.tools.process import Limits, run_worker

MAX_SQL_CHARS = 10_000
MAX_ROWS = 100
MAX_RESULT_CHARS = 8_000
MAX_MEMORY_BYTES = 256 << 20


class QueryDatabaseArgs(BaseModel):
    """Arguments of `query_database`."""

    sql: str = Field(description="One statement, for example SELECT name, sql FROM sqlite_master")


def database_tool(path: Path, *, is_writable: bool = False, timeout_s: float = 3.0) -> BaseTool:
    """Return the tool `query_database` for one SQLite file.

    An authorizer lets through SELECT and the PRAGMAs that describe tables; with `is_writable` also INSERT, UPDATE,
    DELETE and CREATE, DROP and ALTER of tables, indexes and views. ATTACH, VACUUM, extensions and other PRAGMAs are
    always refused. A reading connection is opened with mode=ro, and as query_only. Rows, text, time and memory are
    bounded.

    Args:
        path: The database. Links in it are followed once, now.
        is_writable: Let statements change it; one statement is one transaction.
        timeout_s: For one statement, in seconds; the process is killed a second later.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give an SQLite database")
    place = path.resolve()
    companions = [place.with_name(place.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
    limits = Limits(seconds=timeout_s + 1, cpu_seconds=math.ceil(timeout_s + 1), memory_bytes=MAX_MEMORY_BYTES)
    read = [file for file in companions if not is_writable]
    write = [place.parent] if is_writable else []

    def query_database(sql: str) -> str:
        """Run one SQL statement on the database and return its rows."""
        if len(sql) > MAX_SQL_CHARS:
            raise ToolException(f"the statement has {len(sql)} characters; at most {MAX_SQL_CHARS} are allowed")
        arguments = {
            "path": str(place),
            "sql": sql,
            "is_writable": is_writable,
            "max_rows": MAX_ROWS,
            "max_chars": MAX_RESULT_CHARS,
            "seconds": timeout_s,
        }
        return run_worker("database_worker", arguments, limits=limits, read=read, write=write).rstrip("\n")

    return make_tool(query_database, QueryDatabaseArgs)
