"""LangGraph agents on a local model, with history-free speculative decoding and sessions that survive their process.

Nothing heavy is imported before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlite_agent.agent import create_dlite_agent
    from dlite_agent.chat_model import ChatDLite
    from dlite_agent.config import Settings
    from dlite_agent.errors import DLiteError
    from dlite_agent.sessions.saver import RedisSaver
    from dlite_agent.sessions.store import SessionStore

__version__ = "0.1.0"

__all__ = ["ChatDLite", "DLiteError", "RedisSaver", "SessionStore", "Settings", "__version__", "create_dlite_agent"]

_HOMES = {
    "ChatDLite": "dlite_agent.chat_model",
    "DLiteError": "dlite_agent.errors",
    "RedisSaver": "dlite_agent.sessions.saver",
    "SessionStore": "dlite_agent.sessions.store",
    "Settings": "dlite_agent.config",
    "create_dlite_agent": "dlite_agent.agent",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlite_agent' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
