"""A workspace full of traps, and what must not be touched outside of it: where attacks on the tools are carried out."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from dlite_agent.bench.agent.attacks import FILES, PYTHON, READ_ONLY_SQL, SQL, WRITABLE_SQL
from dlite_agent.errors import ConfigError
from dlite_agent.tools import Limits, database_tool, default_tools, note_tools, python_tool
from dlite_agent.tools.process import require_confinement

SECRET = "the password is 7391"
SECRET_VARIABLE = "DLITE_TEST_SECRET"
ROOMY = Limits(memory_bytes=256 << 20, file_bytes=1 << 20, disk_bytes=8 << 20, output_bytes=1 << 18)
SHORT = replace(ROOMY, seconds=1.5, cpu_seconds=1)
LONGEST_ANSWER = 20_000

Attack = tuple[str, Callable[["House"], BaseTool], dict[str, Any], str]
"""Its name, the tool, what is passed to it, and a pattern of the answer."""


class House:
    """The workspace, a folder beside it that nothing may reach, a database, and two places that listen."""

    def __init__(self, base: Path) -> None:
        """Make all of it in an empty folder."""
        self.out, self.work, self.database = base / "out", base / "work", base / "data" / "people.db"
        for folder in (self.out, self.work, self.database.parent, base / "notes"):
            folder.mkdir()
        (self.out / "secret.txt").write_text(SECRET)
        (self.work / "a.txt").write_text("fine\n")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.inbox.bind(str(self.out / "sock"))
        self.inbox.setblocking(False)
        self.notes = base / "notes"
        os.symlink(self.out / "secret.txt", self.notes / "planted.txt")
        self._make_database()
        self.before = self.outside()

    def close(self) -> None:
        """Stop listening."""
        self.listener.close()
        self.inbox.close()

    def _make_database(self) -> None:
        with closing(sqlite3.connect(self.database)) as connection:
            connection.execute("CREATE TABLE people (name, age)")
            connection.execute("INSERT INTO people VALUES ('Ann', 41)")
            connection.execute("CREATE TABLE many AS SELECT value FROM json_each(?)", (str(list(range(500))),))
            connection.commit()

    def plant(self) -> None:
        """Put the traps for the file tools into the workspace."""
        work = self.work
        os.symlink(self.out / "secret.txt", work / "link")
        os.symlink(self.out, work / "out-link")
        os.symlink(self.out / "new.txt", work / "dangling")
        os.link(self.out / "secret.txt", work / "hard")
        os.mkfifo(work / "fifo")
        try:
            os.mknod(work / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        except PermissionError:  # only root makes devices
            os.symlink("/dev/zero", work / "zero")
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(work / "socket"))
        (work / "a\nfake.txt").write_text("12345")
        with open(work / "huge", "wb") as stream:
            stream.truncate(1 << 40)
        (work / "line").write_text("x" * 500_000 + "ab" + "x" * 500_000)
        (work / "many").mkdir()
        for number in range(220):
            (work / "many" / str(number)).touch()

    def outside(self) -> list[tuple[str, int, float, bytes]]:
        """Return names, modes, times and contents of all outside the workspace."""
        found = []
        for path in sorted([*self.out.iterdir(), self.database]):
            status = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found.append((path.name, status.st_mode, status.st_mtime, data))
        return found

    def fill_in(self, text: str) -> str:
        """Put places and numbers for their names."""
        facts = {
            "{out}": self.out,
            "{pid}": os.getpid(),
            "{port}": self.listener.getsockname()[1],
            "{sock}": self.out / "sock",
            "{socket_call}": 41 if os.uname().machine == "x86_64" else 198,
        }
        for name, value in facts.items():
            text = text.replace(name, str(value))
        return text

    def escapes(self, message: ToolMessage) -> list[str]:
        """Say what came in or went out, and what was left behind; nothing where all held."""
        base = self.out.parent
        found = {
            "the answer holds the secret": SECRET in str(message.content),
            "the answer is too long": len(str(message.content)) >= LONGEST_ANSWER,
            "something outside was changed": self.outside() != self.before,
            "a connection came": _receives(self.listener.accept),
            "a message came": _receives(lambda: self.inbox.recv(1)),
            "a process was left": any(str(base).encode() in environment for environment in _environments()),
            "a scratch folder was left": any(path.name.startswith("dlite-run-") for path in base.iterdir()),
        }
        return [what for what, is_so in found.items() if is_so]


@contextmanager
def built(base: Path) -> Iterator[House]:
    """Build a house in an empty folder; meanwhile its secret is in the environment, and scratch folders lie there."""
    scratch = tempfile.tempdir
    os.environ[SECRET_VARIABLE], tempfile.tempdir = SECRET, str(base)
    house = House(base)
    try:
        yield house
    finally:
        house.close()
        tempfile.tempdir = scratch
        del os.environ[SECRET_VARIABLE]


def call(tool: BaseTool, arguments: Mapping[str, Any]) -> ToolMessage:
    """Have a tool answer a call as an agent's tool node does."""
    message = tool.invoke({"type": "tool_call", "id": "1", "name": tool.name, "args": dict(arguments)})
    assert isinstance(message, ToolMessage)
    return message


def attack(house: House, tool: BaseTool, arguments: Mapping[str, Any], expected: str) -> tuple[list[str], str]:
    """Carry out an attack; returns how it escaped, and the answer if that is not the expected one."""
    filled = {name: house.fill_in(value) if isinstance(value, str) else value for name, value in arguments.items()}
    message = call(tool, filled)
    is_expected = re.search(expected, str(message.content)) is not None
    return house.escapes(message), "" if is_expected else str(message.content)


def all_attacks() -> list[Attack]:
    """Return the attacks of all tables; those by programs only where programs can be confined."""
    found: list[Attack] = [(f"files: {name}", _planted(tool), args, says) for name, tool, args, says in FILES]
    if is_confined():
        found += [(f"python: {name}", _python(says), {"code": code}, says) for name, code, says in PYTHON]
    found += [(f"sql: {name}", _database(says, False), {"sql": sql}, says) for name, sql, says in SQL + READ_ONLY_SQL]
    return found + [(f"sql: {name}", _database(says, True), {"sql": sql}, says) for name, sql, says in WRITABLE_SQL]


def database_seconds(expected: str) -> float:
    """Return how long a statement may run: briefly where that is attacked, else as long as a busy machine takes."""
    return 1 if re.search("longer than|stopped after", expected) else 30


def is_confined() -> bool:
    """Whether this system can confine programs."""
    try:
        require_confinement()
    except ConfigError:
        return False
    return True


def _planted(name: str) -> Callable[[House], BaseTool]:
    def make(house: House) -> BaseTool:
        house.plant()
        return next(tool for tool in [*default_tools(house.work), *note_tools(house.notes)] if tool.name == name)

    return make


def _python(expected: str) -> Callable[[House], BaseTool]:
    def make(house: House) -> BaseTool:
        os.symlink(house.out / "secret.txt", house.work / "link")
        return python_tool(house.work, limits=SHORT if "stopped after" in expected else ROOMY)

    return make


def _database(expected: str, is_writable: bool) -> Callable[[House], BaseTool]:
    return lambda house: database_tool(house.database, is_writable=is_writable, timeout_s=database_seconds(expected))


def _receives(receive: Callable[[], object]) -> bool:
    try:
        receive()
    except BlockingIOError:
        return False
    return True


def _environments() -> Iterator[bytes]:
    """Yield the environment of each other process; what a tool starts has its scratch folder in it, and hands it on."""
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError):
            yield Path("/proc", pid, "environ").read_bytes() if int(pid) != os.getpid() else b""
