"""All attacks on the tools, each in a house of its own: how many escape."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.bench.agent.house import all_attacks, attack, built


@dataclass(frozen=True, slots=True)
class SiegeReport:
    """What the attacks came to.

    Attributes:
        attacks: How many were carried out.
        escaped: Those that reached something outside or left something behind, and what.
        unexpected: Those whose answer is not the expected one, and that answer.
    """

    attacks: int
    escaped: dict[str, list[str]]
    unexpected: dict[str, str]


def besiege(*, say: Callable[[str], None]) -> SiegeReport:
    """Carry out every attack."""
    escaped: dict[str, list[str]] = {}
    unexpected: dict[str, str] = {}
    attacks = all_attacks()
    for number, (name, make_tool, arguments, expected) in enumerate(attacks, start=1):
        with tempfile.TemporaryDirectory(prefix="dlite-bench-") as folder, built(Path(folder)) as house:
            faults, answer = attack(house, make_tool(house), arguments, expected)
        if faults:
            escaped[name] = faults
        if answer:
            unexpected[name] = answer[:200]
        if faults or answer or number % 50 == 0:
            say(f"{number} of {len(attacks)} attacks: {name}: {'; '.join(faults) or answer[:200] or 'held'}")
    return SiegeReport(len(attacks), escaped, unexpected)
