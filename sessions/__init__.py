"""Sessions in Redis: KV blocks, snapshots and heads, LangGraph checkpoints, and the embedded server they live in.

This package moves bytes. What the bytes of a KV block mean is the engine's business, which it never imports.
"""

from __future__ import annotations
