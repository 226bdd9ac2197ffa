"""`dlite-agent sessions ...`: look at what is stored, move it, check it, remove it.

What is printed is plain text of one line per thing, without colours or boxes, and names are escaped: a thread id may
hold anything. Scripts read `--json`: one object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError, UnknownSessionError

if TYPE_CHECKING:
    from dlite_agent.sessions.inventory import Inventory, SessionInfo
    from dlite_agent.sessions.keys import SessionName
    from dlite_agent.sessions.store import SessionStore

Subparsers = argparse._SubParsersAction
Action = Callable[[argparse.Namespace, "SessionStore"], int]

_NAME_WIDTH = 40
_ID_WIDTH = 12
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def add_sessions(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the `sessions` commands to a parser."""
    sessions = commands.add_parser("sessions", help="look at stored sessions, move, check and remove them")
    actions = sessions.add_subparsers(required=True, metavar="ACTION")
    _add(actions, _list, "ls", "list sessions, the one used last first")
    show = _add(actions, _show, "show", "show a thread's sessions and their snapshots")
    _add_session(show)
    _add(actions, _usage, "du", "say what takes how much memory of the server, and what is shared")
    fork = _add(actions, _fork, "fork", "start a new thread from a snapshot of another; blocks are stored once")
    _add_session(fork)
    fork.add_argument("new_thread", metavar="NEW_THREAD", help="thread id of the fork")
    fork.add_argument("--snapshot", metavar="ID", help="where to start (default: where the session is)")
    export = _add(actions, _export, "export", "write a session to a file (LangGraph checkpoints are not in it)")
    _add_session(export)
    export.add_argument("file", type=Path, metavar="FILE", help="a file that does not exist")
    take = _add(actions, _import, "import", "check a file of `export` as a whole, then make its session")
    take.add_argument("file", type=Path, metavar="FILE", help="a file that `export` wrote")
    take.add_argument("--thread", metavar="THREAD", help="what to call it (default: as it was)")
    take.add_argument("--namespace", metavar="NAMESPACE", help="with --thread: its namespace (default: as it was)")
    take.add_argument("--target", metavar="HASH", help="accept only this target (`show` prints it)")
    remove = _add(actions, _remove, "rm", "remove a thread's sessions (not its LangGraph checkpoints)")
    _add_session(remove)
    remove.add_argument("--gc", action="store_true", help="remove the blocks no other session shares as well, at once")
    _add_collect(actions)
    _add(actions, _verify, "verify", "check every digest, chain and reference; exit code 1 if anything is wrong")


def _add(actions: Subparsers[argparse.ArgumentParser], action: Action, name: str, what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tenant", default="default", help="whose sessions (default: %(default)s)")
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="holds the tenant's secret, at most 64 bytes")
    parser.set_defaults(command=_run, action=action)
    return parser


def _add_session(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("thread", nargs="?", metavar="THREAD", help="thread id, any text")
    which.add_argument("--id", dest="sid", metavar="ID", help="session id, or its start, as `ls` prints it")
    parser.add_argument("--namespace", metavar="NAMESPACE", help="checkpoint namespace, if the thread has several")


def _add_collect(actions: Subparsers[argparse.ArgumentParser]) -> None:
    collect = _add(actions, _collect, "gc", "remove what nothing refers to")
    collect.add_argument(
        "--grace", type=int, metavar="SECONDS", help="spare what was used within so many seconds (default: an hour)"
    )
    collect.add_argument("--dry-run", action="store_true", help="only say what nothing refers to")
    collect.add_argument("--damaged", action="store_true", help="remove snapshots that cannot be read as well")


def _run(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.sessions.embedded import connect
    from dlite_agent.sessions.store import SessionStore

    secret = b""
    if arguments.secret_file is not None:
        try:
            secret = arguments.secret_file.read_bytes()
        except OSError as error:
            raise ConfigError(f"--secret-file cannot be read: {error}") from error
    client = connect(settings)
    try:
        action: Action = arguments.action
        return action(arguments, SessionStore(client, tenant=arguments.tenant, secret=secret))
    finally:
        client.close()


def _list(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.inventory import take_inventory

    sessions = take_inventory(store).sessions
    if arguments.json:
        return _say_json({"sessions": [_session_json(info) for info in sessions]})
    rows = [
        [
            _label(info),
            info.sid[:_ID_WIDTH],
            str(info.num_turns),
            str(info.num_tokens),
            _size(info.num_bytes),
            _size(info.shared_bytes),
            _ago(info.last_turn_at),
            _span(info.expires_s),
        ]
        for info in sessions
    ]
    _table(["thread", "id", "turns", "tokens", "size", "shared", "last turn", "expires"], rows)
    return 0


def _show(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.inventory import take_inventory

    inventory = take_inventory(store)
    found = _found(arguments, inventory)
    if arguments.json:
        return _say_json({"sessions": [_session_json(info, inventory) for info in found]})
    for info in found:
        _say(f"thread     {_label(info)}")
        _say(f"namespace  {_escape(info.name.namespace) if info.name else 'unknown'}")
        _say(f"id         {info.sid}")
        _say(f"target     {info.target or 'none yet'}")
        _say(f"turns      {info.num_turns}, {info.num_tokens} tokens, last {_ago(info.last_turn_at)}")
        _say(f"size       {_size(info.num_bytes)}, of it {_size(info.shared_bytes)} shared with other sessions")
        _say(f"blocks     {info.num_blocks}, {info.num_shared} of them shared; {info.num_missing} records are missing")
        _say(f"expires    {_span(info.expires_s)}, unless it is used")
        rows = [
            [
                "*" if snapshot["is_head"] else "",
                str(snapshot["id"]),
                str(snapshot["tokens"]),
                _ago(snapshot["made_at"]),
            ]
            for snapshot in _snapshots_json(info, inventory)
        ]
        _table(["", "snapshot", "tokens", "made"], rows)
    return 0


def _usage(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.inventory import take_inventory

    inventory = take_inventory(store)
    seen = inventory.seen
    kinds: dict[str, list[int]] = {}
    for key, parts in seen.parts.items():
        kinds.setdefault(parts.kind, []).append(seen.sizes[key])
    referred = {key for of in seen.snapshots.values() for facts in of.values() if facts for key in facts.records}
    loose = [seen.sizes[key] for key in seen.keys_of("block", "side") if key not in referred]
    if arguments.json:
        usage = {kind: {"keys": len(sizes), "bytes": sum(sizes)} for kind, sizes in sorted(kinds.items())}
        loose_json = {"keys": len(loose), "bytes": sum(loose)}
        return _say_json(
            {
                "kinds": usage,
                "unreferenced": loose_json,
                "unknown_keys": len(seen.unknown),
                "sessions": [_session_json(info) for info in inventory.sessions],
            }
        )
    largest = sorted(inventory.sessions, key=lambda info: info.num_bytes, reverse=True)
    rows = [
        [_label(i), i.sid[:_ID_WIDTH], _size(i.num_bytes), _size(i.own_bytes), _size(i.shared_bytes)] for i in largest
    ]
    _table(["thread", "id", "size", "its own", "shared"], rows)
    _say("")
    rows = [[kind, str(len(sizes)), _size(sum(sizes))] for kind, sizes in sorted(kinds.items())]
    rows.append(["(no snapshot refers to)", str(len(loose)), _size(sum(loose))])
    rows.append(["all", str(len(seen.sizes)), _size(sum(seen.sizes.values()))])
    _table(["kind", "keys", "size"], rows)
    return 0


def _fork(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.creating import fork_session
    from dlite_agent.sessions.inventory import take_inventory
    from dlite_agent.sessions.keys import SessionName

    info = _only(arguments, take_inventory(store))
    old = _name(arguments, info)
    name = SessionName(arguments.new_thread, old.namespace)
    made = fork_session(store, info.sid, name, snapshot_id=arguments.snapshot)
    if arguments.json:
        return _say_json(asdict(made))
    missing = f"; {made.num_missing} are gone and will be computed again" if made.num_missing else ""
    _say(
        f"{_escape(arguments.new_thread)} ({made.sid}) starts at {made.snapshot_id}: {made.num_tokens} tokens, "
        f"{made.num_records} records shared{missing}"
    )
    return 0


def _export(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.inventory import take_inventory
    from dlite_agent.sessions.transfer import export_session

    info = _only(arguments, take_inventory(store))
    moved = export_session(store, info.sid, arguments.file)
    if arguments.json:
        return _say_json(asdict(moved))
    missing = f"; {moved.num_missing} records were gone and will be computed again" if moved.num_missing else ""
    _say(
        f"{_escape(str(arguments.file))}: {_size(moved.num_bytes)}, {moved.num_snapshots} snapshots, "
        f"{moved.num_records} records{missing}"
    )
    return 0


def _import(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.transfer import import_session

    moved = import_session(
        store, arguments.file, thread_id=arguments.thread, namespace=arguments.namespace, target=arguments.target
    )
    if arguments.json:
        return _say_json(asdict(moved))
    _say(
        f"session {moved.sid}: {moved.num_snapshots} snapshots, {moved.num_records} records, "
        f"{_size(moved.bytes_written)} were not there yet"
    )
    return 0


def _remove(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.collecting import remove_session
    from dlite_agent.sessions.inventory import take_inventory

    found = _found(arguments, take_inventory(store))
    done = [(info, remove_session(store, info.sid, with_blocks=arguments.gc)) for info in found]
    if arguments.json:
        return _say_json({"removed": [{"sid": info.sid, **asdict(removed)} for info, removed in done]})
    for info, removed in done:
        _say(f"{_label(info)} ({info.sid}): {_counts(removed.num_removed)}, {_size(removed.num_bytes)}")
    return 0


def _collect(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.collecting import DEFAULT_GRACE_S, collect_garbage

    grace_s = DEFAULT_GRACE_S if arguments.grace is None else arguments.grace
    done = collect_garbage(store, grace_s=grace_s, is_dry=arguments.dry_run, with_damaged=arguments.damaged)
    if arguments.json:
        return _say_json(asdict(done))
    what = f"{_counts(done.num_removed)}, {_size(done.num_bytes)}"
    _say(f"would remove {what}" if arguments.dry_run else f"removed {what}; {done.num_spared} spared, used lately")
    return 0


def _verify(arguments: argparse.Namespace, store: SessionStore) -> int:
    from dlite_agent.sessions.checking import verify

    done = verify(store)
    if arguments.json:
        _say_json(asdict(done))
    else:
        for finding in done.findings:
            what = finding.what if finding.what.isprintable() else repr(finding.what)
            _say(f"{finding.fault:8} {finding.key}: {what}")
        wrong = f"{len(done.findings)} findings" if done.findings else "all sound"
        _say(f"{done.num_records} records, {_size(done.num_bytes)} of rows read: {wrong}")
    return 1 if done.findings else 0


def _found(arguments: argparse.Namespace, inventory: Inventory) -> list[SessionInfo]:
    if arguments.sid is not None:
        return [inventory.by_id(arguments.sid)]
    return inventory.find(arguments.thread, arguments.namespace)


def _only(arguments: argparse.Namespace, inventory: Inventory) -> SessionInfo:
    found = _found(arguments, inventory)
    if len(found) > 1:
        spaces = ", ".join(repr(info.name.namespace) if info.name else info.sid for info in found)
        raise UnknownSessionError(f"the thread has {len(found)} sessions ({spaces}); choose with --namespace or --id")
    return found[0]


def _name(arguments: argparse.Namespace, info: SessionInfo) -> SessionName:
    """Return a session's name, of which a fork takes the namespace."""
    from dlite_agent.sessions.keys import SessionName

    if arguments.namespace is not None:
        return SessionName("", arguments.namespace)
    if info.name is None:
        raise ConfigError(f"session {info.sid} has no name, so its namespace is not known; give --namespace")
    return info.name


def _session_json(info: SessionInfo, inventory: Inventory | None = None) -> dict[str, Any]:
    found = asdict(info)
    name = found.pop("name")
    found = {"thread": name and name["thread_id"], "namespace": name and name["namespace"], **found}
    found["own_bytes"] = info.own_bytes
    return found if inventory is None else {**found, "snapshots": _snapshots_json(info, inventory)}


def _snapshots_json(info: SessionInfo, inventory: Inventory) -> list[dict[str, Any]]:
    """List a session's snapshots, newest first; those that cannot be read last."""
    of_session = inventory.seen.snapshots.get(info.sid, {})
    found = [
        {
            "id": snapshot_id,
            "is_head": snapshot_id == info.snapshot_id,
            "parent": facts.parent if facts else None,
            "tokens": facts.num_tokens if facts else None,
            "kv_tokens": facts.num_kv if facts else None,
            "blocks": len(facts.blocks) if facts else None,
            "made_at": facts.created_at if facts else None,
        }
        for snapshot_id, facts in of_session.items()
    ]
    return sorted(found, key=lambda snapshot: snapshot["made_at"] or 0.0, reverse=True)


def _counts(removed: dict[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(removed.items())) or "no record"


def _label(info: SessionInfo) -> str:
    """Name a session for people, on one line; a name that is long is cut."""
    if info.name is None:
        return "(unknown)"
    space = info.name.namespace
    return _escape(info.name.thread_id) + (f" [{_escape(space)}]" if space else "")


def _escape(text: str) -> str:
    """Show a text as it is if it is plain, else quoted, without anything a terminal would act on."""
    cut = text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."
    is_plain = cut.isprintable() and cut and " " not in cut and cut != "(unknown)"
    return cut if is_plain else repr(cut)


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} GiB"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "0 s"


def _ago(moment: float | None) -> str:
    return "never" if moment is None else f"{_span(max(time.time() - moment, 0.0))} ago"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        _say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _say(line: str) -> None:
    """Print a line, whatever the terminal can show."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _say_json(value: object) -> int:
    sys.stdout.write(json.dumps(value, sort_keys=True) + "\n")
    return 0
