"""Which commit of this project made a figure or a file."""

from __future__ import annotations

import subprocess
from pathlib import Path


def source_commit(*, is_short: bool = False) -> str | None:
    """Return the commit of the checkout this package lies in, or None outside one."""
    command = [
        "git",
        "-C",
        str(Path(__file__).resolve().parent),
        "rev-parse",
        *(["--short"] if is_short else []),
        "HEAD",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
