"""LangGraph agents on a local model, with history-free speculative decoding and sessions that survive their process."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
