"""Prompts and replies as text: chat templates, exact re-encoding, tool-call dialects, the streaming parser.

Everything here is pure and runs without torch. LangChain is imported by `prompting.messages` alone.
"""

from __future__ import annotations
