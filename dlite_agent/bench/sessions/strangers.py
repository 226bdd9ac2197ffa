"""Others on the same server: tenants, hostile names, other weights, other templates, other tools."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig

from dlite_agent.bench.sessions.trial import Trial
from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.errors import DLiteError
from dlite_agent.runtime import close_all
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import TINY_CHAT_TEMPLATE, write_tiny_chat_model

HOSTILE = (
    "*",
    "{}",
    ":",
    "a:b",
    "{a}:h",
    "}:h",
    "x}:c:*",
    "line\nbreak\r\nSET a b",
    "\x00",
    "?[a-z]\\",
    "dlite:1:*",
    "a" * 10_000,
    "\ud800",
    "",
)
ID_PAIRS = (
    (("a", "b"), ("ab", "")),
    (("a|b", "c"), ("a", "b|c")),
    (("a:b", ""), ("a", "b")),
    (("1", "0"), ("10", "")),
    (("é", ""), ("e\u0301", "")),
    (("A", ""), ("a", "")),
    (("a", ""), ("a ", "")),
    (("", "a"), ("a", "")),
    (("a\x00b", ""), ("a", "\x00b")),
)
_REPLY_TOKENS = 12


def tenants(trial: Trial) -> None:
    """Let two tenants, or two secrets of one, hold the same conversation in threads of the same name."""
    kind = ("tenants", "secrets")[trial.seed % 2]
    names: tuple[dict[str, Any], ...] = ({"tenant": "a"}, {"tenant": trial.random.choice(["a:", "*", "A", "a\n"])})
    if kind == "secrets":
        names = ({"tenant": "a"}, {"tenant": "b", "secret": b"secret"})
    prompts = [trial.message()]
    ends: list[set[bytes]] = []
    for name in names:
        store = trial.store(**name)
        turn = trial.turn(trial.keeper(store), prompts[0])
        if turn is not None and turn.reuse.from_store:
            trial.wrong.append(f"{name} was given {turn.reuse.from_store} rows of another tenant")
        ends.append(set(store.client.scan_iter(match=store.keys.everything(), count=1000)))
    if ends[0] & ends[1]:
        trial.wrong.append("two tenants share keys")
    trial.note = kind
    trial.check_usable()


def names_alike(trial: Trial) -> None:
    """Hold two conversations whose names are easily taken for each other."""
    pair = ID_PAIRS[trial.seed % len(ID_PAIRS)]
    one, two = (SessionName(*parts) for parts in pair)
    trial.note = repr(pair)
    histories: dict[SessionName, list[int]] = {one: trial.message(), two: trial.message()}
    for _ in range(2):
        for name, history in histories.items():
            turn = trial.turn(trial.keeper(), history, name=name)
            if turn is not None:
                histories[name] = [*history, *turn.tokens, *trial.message()]
    if one.sid == two.sid:
        trial.wrong.append("both are one session")
    trial.store().delete_session(one.sid)
    _check_reuse(trial, two, histories[two])
    trial.check_usable()


def names_hostile(trial: Trial) -> None:
    """Hold, and then delete, a conversation whose name is a pattern, a key, a command or far too long."""
    name = SessionName(HOSTILE[trial.seed % len(HOSTILE)], trial.random.choice(["", *HOSTILE[:6]]))
    trial.note = repr(name.thread_id[:40])
    trial.converse(trial.keeper())
    before = {key: trial.store().client.dump(key) for key in trial.store().client.scan_iter()}
    prompt = trial.message()
    turn = trial.turn(trial.keeper(), prompt, name=name)
    if turn is not None:
        _check_reuse(trial, name, [*prompt, *turn.tokens, *trial.message()])
    store = trial.store()
    store.delete_session(name.sid)
    if any(store.client.dump(key) != record for key, record in before.items()):
        trial.unusable.append("removing it changed another session")
    if "unknown" in store.usage():
        trial.unusable.append("it left a key that is no known one")
    trial.check_usable(must_reuse=True)


def weights_changed(trial: Trial) -> None:
    """Continue a stored session with other weights, and with the first ones again."""
    trial.converse(trial.keeper())
    trial.note = "other weights"
    other = 1 + trial.seed % 2
    turn = trial.turn(trial.keeper(seed=other), [*trial.history, *trial.message()], seed=other)
    if turn is not None and turn.reuse.from_store:
        trial.wrong.append(f"{turn.reuse.from_store} rows of other weights were used")
    trial.check_usable()


def template_changed(trial: Trial) -> None:
    """Continue a stored conversation with another chat template."""
    _chat(trial, templates=(TINY_CHAT_TEMPLATE, f"Be brief.\n{TINY_CHAT_TEMPLATE}"), tools=((), ()))
    trial.note = "another template"


def tools_changed(trial: Trial) -> None:
    """Continue a stored conversation with other tools, or with one more."""
    kept = trial.random.random() < 0.5
    tools = (_tool("look"), _tool("ask"))
    _chat(trial, templates=(TINY_CHAT_TEMPLATE, TINY_CHAT_TEMPLATE), tools=(tools[:1], tools if kept else tools[1:]))
    trial.note = "one more tool" if kept else "another tool"


def _check_reuse(trial: Trial, name: SessionName, prompt: list[int]) -> None:
    turn = trial.turn(trial.keeper(), prompt, name=name)
    if turn is None or not turn.reuse.from_store:
        trial.unusable.append(f"nothing of session {name.thread_id[:40]!r} was reused")


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": f"{name} it.", "parameters": parameters}}


def _chat(trial: Trial, *, templates: tuple[str, str], tools: tuple[tuple[dict[str, Any], ...], ...]) -> None:
    """Take turns of one thread in two set-ups, and compare each text with that of the set-up alone."""
    messages: list[BaseMessage] = []
    config: RunnableConfig = {"configurable": {"thread_id": trial.name.thread_id}}
    for index in (0, 1, 1, 0):
        messages.append(HumanMessage(f"question {trial.random.randrange(10**6)}"))
        folder = _chat_folder(trial.lab.folder, templates[index])
        try:
            stored, reused = _answer(folder, messages, tools[index], config=config, store=trial.store())
            alone, _ = _answer(folder, messages, tools[index], config=None, store=None)
        except DLiteError as error:
            trial.errors.append(type(error).__name__)
            continue
        finally:
            close_all()
            gc.collect()
        if stored.content != alone.content or stored.additional_kwargs != alone.additional_kwargs:
            trial.wrong.append(f"got {stored.content!r}, expected {alone.content!r}")
        if index and len(messages) > 5 and not reused:
            trial.unusable.append("a second turn in one set-up reused nothing")
        messages.append(stored)
    trial.check_usable()


def _answer(
    folder: Path,
    messages: list[BaseMessage],
    tools: tuple[dict[str, Any], ...],
    *,
    config: RunnableConfig | None,
    store: SessionStore | None,
) -> tuple[BaseMessage, int]:
    """Answer with the folder's model; returns the message and the rows that came from the store."""
    settings = Settings(home=folder.parent / "home", redis_url=None, threads=1, offline=True)
    model = ChatDLite(model=str(folder), settings=settings, max_tokens=_REPLY_TOKENS, session_store=store)
    model.logit_bias = _letters_only(model)
    runnable: Any = model.bind_tools(tools) if tools else model
    message: BaseMessage = runnable.invoke(messages, config)
    stats: Mapping[str, int] = message.response_metadata["dlite"]["stats"]
    return message, stats["reused_store"]


def _letters_only(model: ChatDLite) -> dict[int, float]:
    """Keep the random model from writing bytes whose text is encoded to other tokens: then ids follow from texts."""
    runtime = model.runtime
    written = (runtime.encoder.token_bytes[token] for token in range(runtime.target.vocab_size))
    return {token: -100.0 for token, text in enumerate(written) if not text.isalpha() and token not in runtime.end_ids}


def _chat_folder(base: Path, template: str) -> Path:
    """Write the tiny chat model with a template, once per lab."""
    folder = base / f"chat-{len(template)}"
    if not folder.exists():
        write_tiny_chat_model(folder)
        (folder / "chat_template.jinja").write_text(template)
    return folder
