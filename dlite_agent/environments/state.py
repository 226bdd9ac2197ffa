"""What an environment's end state is compared to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndState:
    """Whether an environment ended as the benchmark's own calls leave it.

    Attributes:
        is_equal: Whether it did.
        difference: What differs, in the benchmark's words; empty if nothing does.
    """

    is_equal: bool
    difference: str = ""
