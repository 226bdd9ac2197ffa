"""How many bytes a drafter holds for the texts it drafts for.

A drafter that keeps something about its texts says how much (`state_bytes`). Of one that does not say, everything that
can be reached from it is counted, tensors, arrays and containers, before and after: what it gained, it holds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic)
_NOT_FOLLOWED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.dtype, torch.device)


@runtime_checkable
class StateKeeper(Protocol):
    """A drafter that keeps something about its texts."""

    def state_bytes(self) -> int:
        """Return the bytes held for all live texts."""
        ...


class HeldBytes:
    """Counts what one drafter holds beyond what it held when it was new, or what it says."""

    def __init__(self, drafter: object) -> None:
        """Take the drafter as it is now for one that holds nothing; caches that texts share must be there already."""
        self._drafter = drafter
        self._before = 0 if isinstance(drafter, StateKeeper) else reachable_bytes(drafter)

    def __call__(self) -> int:
        """Return the bytes held for all live texts."""
        if isinstance(self._drafter, StateKeeper):
            gc.collect()  # a text that is over may still hang in a cycle
            return self._drafter.state_bytes()
        return max(0, reachable_bytes(self._drafter) - self._before)


def reachable_bytes(root: object) -> int:
    """Return the bytes of everything that an object refers to, each once, but for functions, types and modules."""
    seen: set[int | tuple[str, int]] = set()
    waiting: list[Any] = [root]
    total = 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _NOT_FOLLOWED):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            address, num_bytes = _memory(value)
            if ("storage", address) not in seen:
                seen.add(("storage", address))
                total += num_bytes
        elif isinstance(value, np.ndarray):
            total += value.nbytes
        else:
            total += sys.getsizeof(value)
            waiting += _inside(value)
    return total


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's memory is, and its bytes."""
    if tensor.is_mkldnn:  # packed weights
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _inside(value: Any) -> Iterator[Any]:
    """Yield what an object refers to."""
    if isinstance(value, _LEAVES):
        return
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        yield from value
    if hasattr(value, "__dict__"):
        yield vars(value)
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)
