"""Grammars over tokens: what may follow, what must follow, and where a grammar starts by itself."""

from dlite_agent.constraints.factory import GrammarFactory

__all__ = ["GrammarFactory"]
