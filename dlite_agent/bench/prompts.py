"""The prompts of recorded sessions: what the model is given wherever the recorded assistant spoke.

Without a folder of recorded sessions, a few short ones that come with the package are used (`excerpt/NOTICE` says from
where).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from langchain_core.messages import AIMessage

from dlite_agent.errors import ConfigError
from dlite_agent.recorded import RecordedSession, read_sessions

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

EXCERPT = Path(__file__).resolve().parent / "excerpt"

Kind = Literal["tool", "prose"]
KINDS: tuple[Kind, ...] = ("tool", "prose")


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """One assistant turn of a recorded session.

    Attributes:
        session_id: The session's name.
        turn: Assistant turns before this one.
        family: The benchmark that the session is from.
        kind: Whether the recorded reply calls a tool.
        ids: The prompt's token ids, as the model is given them.
    """

    session_id: str
    turn: int
    family: str
    kind: Kind
    ids: tuple[int, ...]


def recorded_sessions(
    path: Path | None = None, *, subset: str | None = None, limit: int | None = None
) -> list[RecordedSession]:
    """Read recorded sessions; of the excerpt if `path` is None.

    Args:
        path: As for `read_sessions`.
        subset: A list of ids of `subsets.json`; only with a path.
        limit: The first so many sessions only.

    Raises:
        ConfigError: If nothing can be read.
    """
    if path is None and subset is not None:
        raise ConfigError(f"subset {subset!r} of no folder; give the folder of recorded sessions with --workloads")
    sessions = list(read_sessions(EXCERPT if path is None else path, subset=subset))[:limit]
    if not sessions:
        raise ConfigError(f"{path} holds none of the sessions asked for")
    return sessions


def session_prompts(session: RecordedSession, runtime: Runtime) -> Iterator[RecordedPrompt]:
    """Yield the prompt of every assistant turn, in order; each keeps the ids of the one before as far as it can."""
    known: Sequence[int] = ()
    turn = 0
    for index, message in enumerate(session.messages):
        if not isinstance(message, AIMessage) or index == 0:
            continue
        text = runtime.render(session.messages[:index], session.tools_at(index))
        known = runtime.encoder.encode(text, known)
        kind: Kind = "tool" if message.tool_calls else "prose"
        yield RecordedPrompt(session.id, turn, session.id.split("/", 1)[0], kind, tuple(known))
        turn += 1


def choose(prompts: Sequence[RecordedPrompt], kind: Kind, count: int, *, max_tokens: int) -> list[RecordedPrompt]:
    """Take `count` prompts of a kind, spread evenly over all that have at most `max_tokens` tokens."""
    fitting = [prompt for prompt in prompts if prompt.kind == kind and len(prompt.ids) <= max_tokens]
    if len(fitting) <= count:
        return fitting
    return [fitting[index * len(fitting) // count] for index in range(count)]
