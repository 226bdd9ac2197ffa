"""The JSON line that ends every benchmark: what was measured, on what, with which versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dlite_agent.provenance import source_commit


def json_line(
    bench: str,
    figures: Mapping[str, float],
    *,
    seed: int | None = None,
    details: Mapping[str, Any] | None = None,
    **configuration: Any,
) -> str:
    """Return one line of JSON with figures, configuration, machine and versions.

    Args:
        bench: The benchmark's name.
        figures: What was measured, plain numbers.
        seed: What names the noise in it, or None if there is none.
        details: What lies behind the figures.
        **configuration: What was asked for.
    """
    import torch

    machine = {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }
    versions = {name: version(name) for name in ("torch", "transformers", "dlite-agent")}
    fields: dict[str, Any] = {"bench": bench, "figures": dict(figures), "configuration": configuration, "seed": seed}
    if details is not None:
        fields["details"] = dict(details)
    return json.dumps({**fields, "machine": machine, "versions": versions, "commit": source_commit(is_short=True)})


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
