"""Drafters: each proposes tokens for the target to verify. None of them can change the output."""
