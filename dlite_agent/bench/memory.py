"""What a long prefill needs beside weights and KV rows: peak memory, from the kernel's own count.

    python -m dlite_agent.bench.memory FOLDER --tokens 8064

It runs in a process of its own (`prefill_extra`), since memory that others freed and kept would hide the peak. Before
the prefill the process has run one pass of a single row, so that all weights are in memory, and has given freed memory
back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.arguments import positive
from dlite_agent.errors import ConfigError, DLiteError

if TYPE_CHECKING:
    from dlite_agent.engine.target import Target

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SEED = 0


@dataclass(frozen=True, slots=True)
class PrefillMemory:
    """Bytes in memory: before a prefill, at its peak, and those that its KV rows take."""

    before: int
    peak: int
    kv: int

    @property
    def extra_mb(self) -> float:
        """Megabytes at the peak beside what was there before and the KV rows."""
        return (self.peak - self.before - self.kv) / 1e6


def is_measurable() -> bool:
    """Whether this system counts and resets a process's peak memory."""
    return _CLEAR_REFS.exists()


def prefill_extra(folder: Path, *, num_tokens: int, num_skipped: int, num_threads: int, home: Path) -> PrefillMemory:
    """Measure a prefill of a model folder in another process.

    Args:
        folder: The model.
        num_tokens: Length of the prompt.
        num_skipped: Rows to fill with noise instead of computing them; the peak is in the last rows.
        num_threads: Compute threads.
        home: Where calibration tables are kept.

    Raises:
        DLiteError: If that process failed.
    """
    command = [sys.executable, "-m", "dlite_agent.bench.memory", str(folder), "--tokens", str(num_tokens)]
    command += ["--skip", str(num_skipped), "--threads", str(num_threads), "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise DLiteError(f"the process that measures a prefill's memory ended with {done.returncode}: {last[0]}")
    fields = json.loads(done.stdout.strip().splitlines()[-1])
    return PrefillMemory(**fields)


def measure(folder: Path, *, num_tokens: int, num_skipped: int, home: Path) -> PrefillMemory:
    """Measure in this process.

    Raises:
        ConfigError: If this system does not count peak memory.
    """
    import numpy as np

    from dlite_agent.bench.passes import fill
    from dlite_agent.drafters.null import NullDrafter
    from dlite_agent.engine.decode import decode
    from dlite_agent.engine.request import Request
    from dlite_agent.engine.state import TargetState
    from dlite_agent.engine.target import Target

    if not is_measurable():
        raise ConfigError(f"{_CLEAR_REFS} does not exist; peak memory is measured on Linux only")
    target = Target.load(folder, cache_dir=home / "calibration")
    ids = np.random.default_rng(_SEED).integers(0, target.vocab_size, num_tokens, dtype=np.int32)
    target.forward([int(ids[0])], target.new_cache())
    _touch(target)
    _trim()
    before = _status("VmRSS")
    state = TargetState(target.new_cache())
    if num_skipped:
        fill(target, state.cache, num_skipped)
        state.append(ids[:num_skipped])
        _trim()
    _CLEAR_REFS.write_text(_RESET_PEAK)
    list(decode(target, state, NullDrafter(), Request(ids.tolist(), max_new_tokens=1)))
    kv = state.num_rows * state.cache.rows(0, 1).nbytes
    return PrefillMemory(before, _status("VmHWM"), kv)


def _touch(target: Target) -> None:
    """Read every weight once: pages of the file that nothing has needed yet are not in memory."""
    for parameter in target.model.parameters():
        parameter.sum()


def _trim() -> None:
    """Give freed memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    """Read one of the kernel's counts of this process, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{_STATUS} has no {field}")


def main() -> int:
    """Measure and print one JSON line."""
    import torch

    parser = argparse.ArgumentParser(description="Measure the memory of a prefill.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=positive, required=True)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--threads", type=positive, required=True)
    parser.add_argument("--home", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    memory = measure(arguments.folder, num_tokens=arguments.tokens, num_skipped=arguments.skip, home=arguments.home)
    print(json.dumps({"before": memory.before, "peak": memory.peak, "kv": memory.kv}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
