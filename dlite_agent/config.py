"""The one place where the environment is read: folders, server address, how the target is computed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from dlite_agent.errors import ConfigError

Durability = Literal["turn", "async", "none"]

_MAX_THREADS = 1024
_DTYPES = ("float32", "bfloat16", "float16")


def _default_home() -> Path:
    home = os.environ.get("DLITE_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() if home else Path(cache).expanduser() / "dlite-agent"
    except RuntimeError as error:
        raise ConfigError(f"DLITE_HOME is {home!r} ({error}); expected a folder") from error


def _default_threads() -> int:
    text = os.environ.get("DLITE_THREADS")
    if text is None:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"DLITE_THREADS is {text!r}; expected a positive whole number, or leave it unset")
    return int(text)


def _default_exact() -> bool:
    text = os.environ.get("DLITE_EXACT") or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"DLITE_EXACT is {text!r}; expected 1 or 0, or leave it unset")
    return text == "1"


def _default_durability() -> Durability:
    return cast(Durability, os.environ.get("DLITE_DURABILITY") or "turn")  # checked with the others


@dataclass(frozen=True, slots=True)
class Settings:
    """Process-wide settings; each default lives here once.

    Attributes:
        home: Folder for models, calibration tables and the embedded server's data (`DLITE_HOME`).
        redis_url: Server, Sentinel service or Cluster to use instead of the embedded server (`REDIS_URL`), or None;
            `docs/SESSIONS.md` has the forms.
        threads: Compute threads for the target and the drafter (`DLITE_THREADS`).
        device: Where the target and the drafter run: "cpu", "cuda" or "mps" (`DLITE_DEVICE`).
        dtype: Of the target's weights and rows: "float32", "bfloat16" or "float16" (`DLITE_DTYPE`). Sixteen
            bits halve the memory, but their rounding decides near ties: the text may then depend on how it is drafted.
        exact: Give a row the very same logits in every kind of pass (`DLITE_EXACT` set to 1); float32 on a CPU only.
        durability: When a turn is in the session store (`DLITE_DURABILITY`): "turn", before its reply ends; "async",
            soon after, and before the session's next call; "none", never.
        offline: Never open a network connection (`DLITE_OFFLINE` or `HF_HUB_OFFLINE` set to 1).
    """

    home: Path = field(default_factory=_default_home)
    redis_url: str | None = field(default_factory=lambda: os.environ.get("REDIS_URL") or None)
    threads: int = field(default_factory=_default_threads)
    device: str = field(default_factory=lambda: os.environ.get("DLITE_DEVICE") or "cpu")
    dtype: str = field(default_factory=lambda: os.environ.get("DLITE_DTYPE") or "float32")
    exact: bool = field(default_factory=_default_exact)
    durability: Durability = field(default_factory=_default_durability)
    offline: bool = field(
        default_factory=lambda: "1" in (os.environ.get("DLITE_OFFLINE"), os.environ.get("HF_HUB_OFFLINE"))
    )

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= _MAX_THREADS:
            raise ConfigError(f"threads is {self.threads}; expected 1 to {_MAX_THREADS}")
        if not isinstance(self.exact, bool):
            raise ConfigError(f"exact is {self.exact!r}; expected True or False")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; expected one of {', '.join(_DTYPES)}")

        if self.durability not in get_args(Durability):
            names = ", ".join(get_args(Durability))
            raise ConfigError(f"durability (DLITE_DURABILITY) is {self.durability!r}; expected one of {names}")

    @property
    def models_dir(self) -> Path:
        """Folder of downloaded and converted models."""
        return self.home / "models"

    @property
    def server_dir(self) -> Path:
        """Data folder of the embedded server."""
        return self.home / "server"
