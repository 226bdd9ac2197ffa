"""What a LangGraph config names: a thread, a namespace in it, a checkpoint."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import get_checkpoint_id

from dlite_agent.errors import ConfigError
from dlite_agent.sessions.threads import Thread


def where(config: RunnableConfig) -> dict[str, Any]:
    """Return the part of a config that names things."""
    return config.get("configurable", {})


def named_in(config: RunnableConfig, what: str) -> Any:
    """Return what a config must name: "thread_id" or "checkpoint_id".

    Raises:
        ConfigError: If it does not.
    """
    found = where(config).get(what)
    if found is None:
        raise ConfigError(f"the config names no {what}; expected {{'configurable': {{'{what}': ...}}}}")
    return found


def namespace_of(config: RunnableConfig) -> str:
    """Return the namespace a config names, "" if it names none."""
    return str(where(config).get("checkpoint_ns") or "")


def checkpoint_id_of(config: RunnableConfig) -> str | None:
    """Return the checkpoint a config names, or None."""
    found: object = get_checkpoint_id(config)
    return str(found) if found else None


def config_of(thread: Thread, namespace: str, checkpoint_id: str) -> RunnableConfig:
    """Return the config that names a checkpoint."""
    place = {"thread_id": thread.thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
    return {"configurable": place}
