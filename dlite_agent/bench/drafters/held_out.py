"""The sessions that drafters are measured on: held-out ones only, which no training step has seen.

`train.split` says which those are. Families are named after the benchmarks the sessions are from; open questions are
"general", questions about documents "long_context".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import ConfigError
from dlite_agent.recorded import read_records, taking_turns
from dlite_agent.train.recordings import Turn, training_sessions

AGENT_FAMILIES = ("bfcl", "taubench", "tau2", "tooltalk", "apibank", "openhands", "mint")
_AGENT_FOLDER = "agent"
OTHER_FAMILIES = ("general", "long_context")


@dataclass(frozen=True, slots=True)
class HeldOutSession:
    """A session to measure.

    Attributes:
        id: Its name.
        family: Where it is from.
        is_agent: Whether it is an agent's, of many turns.
        turns: The places where the assistant speaks.
    """

    id: str
    family: str
    is_agent: bool
    turns: tuple[Turn, ...]

    @property
    def needs_replies(self) -> bool:
        """Whether some turn needs the target's reply to one before."""
        return any(message is None for turn in self.turns for message in turn.messages)

    def chosen_turns(self, count: int | None) -> list[int]:
        """Return the indices of the turns to measure, at most `count`, spread evenly, the first and last among them.

        Where a turn needs the reply to one before, it is all of them.
        """
        last = len(self.turns) - 1
        if count is None or count > last or self.needs_replies:
            return list(range(last + 1))
        if count == 1:
            return [last]
        return sorted({round(i * last / (count - 1)) for i in range(count)})


def held_out_sessions(
    workloads: Path | None,
    *,
    subset: str | None = None,
    min_turns: int = 1,
    limit: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[HeldOutSession]:
    """Read the held-out sessions, families taking turns; `say` is told how many others were left out.

    Args:
        workloads: Folder of `agent/`, `general/`, `long_context/`, `subsets.json`.
        subset: A list of ids of `subsets.json`; None for all held-out sessions.
        min_turns: Fewest turns of a session.
        limit: The first so many only.
        say: Is told what was left out.

    Raises:
        ConfigError: If nothing can be read, or nothing of what was asked for is held out.
    """
    if workloads is None:
        raise ConfigError("no sessions are known to be held out; give the folder of recorded sessions with --workloads")
    folders = _folders(workloads)
    every = training_sessions(workloads, is_held_out=True)
    held_out = [
        HeldOutSession(session.id, _family(session.id, folders), folders[session.id] == _AGENT_FOLDER, session.turns)
        for session in every
    ]
    wanted = set(folders) if subset is None else set(_listed(workloads, subset))
    if unknown := sorted(wanted.difference(folders)):
        raise ConfigError(f"{subset!r} lists {unknown[0]!r}, which no file holds; fetch the workloads again")
    chosen = [session for session in held_out if session.id in wanted]
    if num_others := len(wanted) - len(chosen):
        say(
            f"{num_others} of {len(wanted)} sessions are not held out: drafters were trained on them, they are left out"
        )
    chosen = [session for session in chosen if len(session.turns) >= min_turns]
    if not chosen:
        raise ConfigError(f"{workloads} holds no held-out session of those asked for; take another subset, fewer turns")
    return taking_turns(chosen, family=lambda session: session.family)[:limit]


def _folders(workloads: Path) -> dict[str, str]:
    """Return the folder of each session by its id."""
    files = sorted(workloads.glob("*/*.jsonl"))
    return {record["id"]: file.parent.name for file in files for record in read_records(file)}


def _family(name: str, folders: dict[str, str]) -> str:
    if folders[name] != _AGENT_FOLDER:
        return folders[name]
    origin = name.split("/", 1)[0]
    return next((family for family in AGENT_FAMILIES if origin.startswith(family)), origin)


def _listed(workloads: Path, subset: str) -> Sequence[str]:
    path = workloads / "subsets.json"
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))[subset])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no readable list {subset!r} ({error!r})") from error
