"""Which recorded sessions are held out: those that measurements use, and a fixed share of the rest, by group.

Records of one group are variants of one task, so a group is held out whole. The choice depends on names alone: adding
sessions or changing a seed moves nothing from one side to the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from dlite_agent.errors import ConfigError
from dlite_agent.recorded import read_records

HELD_OUT_SHARE = 0.05


def read_groups(workloads: Path) -> dict[str, str]:
    """Return the group of every recorded session by its id; a record without one is a group of its own.

    Raises:
        ConfigError: If a file or a record cannot be read.
    """
    files = sorted(workloads.glob("*/*.jsonl"))
    if not files:
        raise ConfigError(f"{workloads} holds no recorded sessions; expected agent/*.jsonl")
    groups: dict[str, str] = {}
    for file in files:
        for record in read_records(file):
            groups[record["id"]] = record.get("group") or record["id"]
    return groups


def read_listed_ids(workloads: Path) -> frozenset[str]:
    """Return the ids in any list of `subsets.json`: the sessions that measurements use.

    Raises:
        ConfigError: If the file cannot be read; without it nobody knows what must be kept out.
    """
    path = workloads / "subsets.json"
    try:
        subsets = json.loads(path.read_text(encoding="utf-8"))
        return frozenset(name for ids in subsets.values() for name in ids)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}); expected lists of session ids by name") from error


def held_out_groups(groups: Mapping[str, str], listed_ids: Iterable[str]) -> frozenset[str]:
    """Return the groups that no training session may come from.

    Args:
        groups: Group of each session by id.
        listed_ids: Sessions that measurements use.

    Raises:
        ConfigError: If a listed session is not among those with a group.
    """
    listed = set(listed_ids)
    if unknown := sorted(listed.difference(groups)):
        raise ConfigError(f"subsets.json lists {unknown[0]!r}, which no file holds; fetch the workloads again")
    measured = {groups[name] for name in listed}
    return frozenset(group for group in groups.values() if group in measured or _share_of(group) < HELD_OUT_SHARE)


def _share_of(group: str) -> float:
    """Return a number in [0, 1) that depends on the name alone."""
    digest = hashlib.blake2b(group.encode(), digest_size=8, person=b"dlite held out").digest()
    return int.from_bytes(digest) / 2**64
