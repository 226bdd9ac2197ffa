"""A session store from a word: "auto" or a URL."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from dlite_agent.config import Settings
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.store import SessionStore


@cache
def open_store(spec: str, settings: Settings) -> SessionStore:
    """Return the process's store of a spec, connecting the first time.

    Args:
        spec: "auto" for `REDIS_URL` or else the embedded server, which is started if needed; or a URL of a form that
            `REDIS_URL` may have.
        settings: Says where the embedded server lives.

    Raises:
        ConfigError: If a URL has none of those forms.
        StoreUnavailableError: If the server does not answer.
        ServerStartError: If the embedded server does not start.
    """
    chosen = settings if spec == "auto" else replace(settings, redis_url=spec)
    return SessionStore(connect(chosen))
