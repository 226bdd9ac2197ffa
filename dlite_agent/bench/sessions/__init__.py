"""Stored sessions: what survives crashes, damage and pressure, what a restore and a commit cost, and a soak."""
