"""Types of command-line arguments that several commands share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read an argument that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
