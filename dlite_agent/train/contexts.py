"""Whole prompts, ids and hidden states: what a drafter that keeps a history must read to have one.

Prompts of a session mostly begin alike, and so do prompts of sessions with the same tools. So a context names another
prompt of the corpus, its parent, and holds only the rows behind what the two share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dlite_agent.errors import ConfigError

NO_PARENT = -1


class FeatureLog:
    """Features of the first rows of one state, bf16; it follows the state back and forth."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Put `rows [n, S, d]` at a place; what stood there and behind is forgotten.

        Raises:
            ValueError: If there would be a gap.
        """
        self._chunks = self.read(0, start)
        self._chunks.append(rows.to("cpu", torch.bfloat16, copy=True))

    def copy_from(self, other: FeatureLog, length: int) -> None:
        """Hold the first rows of another log, and no others; nothing is copied until it must be."""
        self._chunks = other.read(0, length)

    def read(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the rows from `start` to `stop` as views, in pieces.

        Raises:
            ValueError: If they are not all there.
        """
        if stop > len(self):
            raise ValueError(f"{len(self)} rows; expected at least {stop}")
        pieces, begin = [], 0
        for chunk in self._chunks:
            piece = chunk[max(0, start - begin) : max(0, stop - begin)]
            begin += len(chunk)
            if len(piece):
                pieces.append(piece)
        return pieces


@dataclass(frozen=True, slots=True)
class Context:
    """The rows of one prompt, the last one included.

    Attributes:
        prompt_key: Names the prompt.
        parent_key: Names the prompt whose first `num_shared` rows are this one's too; `NO_PARENT` for none.
        num_shared: How many rows those are.
        ids: `[rows behind those]` int32, the tokens.
        features: `[rows behind those, S, d]` bf16.
    """

    prompt_key: int
    parent_key: int
    num_shared: int
    ids: torch.Tensor
    features: torch.Tensor


def write_contexts(path: Path, contexts: Sequence[Context]) -> None:
    """Write contexts to a file."""
    lengths = torch.tensor([0, *(len(context.features) for context in contexts)])
    tensors = {
        name: torch.cat([getattr(context, name) for context in contexts]).contiguous() for name in ("ids", "features")
    }
    for name in ("prompt_key", "parent_key", "num_shared"):
        tensors[name] = torch.tensor([getattr(context, name) for context in contexts], dtype=torch.int64)
    save_file({**tensors, "offsets": lengths.cumsum(0)}, path)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    start: int
    stop: int
    parent_key: int
    num_shared: int


class ContextReader:
    """Finds the rows of prompts in files of contexts; reads no more than is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read where everything is.

        Raises:
            ConfigError: If a file cannot be read as contexts.
        """
        self._places: dict[int, _Place] = {}
        for path in paths:
            try:
                with safe_open(path, "pt") as file:
                    names = ("prompt_key", "parent_key", "num_shared", "offsets")
                    keys, parents, shared, offsets = (file.get_tensor(name).tolist() for name in names)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} holds no contexts ({error!r}); build the corpus again") from error
            for i, key in enumerate(keys):
                self._places[key] = _Place(path, offsets[i], offsets[i + 1], parents[i], shared[i])

    def __contains__(self, prompt_key: int) -> bool:
        return prompt_key in self._places

    def length(self, prompt_key: int) -> int:
        """Return how many rows a prompt has."""
        place = self._places[prompt_key]
        return place.num_shared + place.stop - place.start

    def ids(self, prompt_key: int) -> torch.Tensor:
        """Return a prompt's tokens, `[n]` int32; raises what `features` raises."""
        return self._read("ids", prompt_key, 0)

    def features(self, prompt_key: int, start: int = 0) -> torch.Tensor:
        """Return a prompt's rows from one on, `[n, S, d]` bf16.

        Raises:
            ConfigError: If a file that was there is not any more.
        """
        return self._read("features", prompt_key, start)

    def _read(self, name: str, prompt_key: int, start: int) -> torch.Tensor:
        pieces: list[torch.Tensor] = []
        stop = self.length(prompt_key)
        while stop > start:
            place = self._places[prompt_key]
            if stop > place.num_shared:
                first = max(start, place.num_shared)
                at = place.start - place.num_shared
                pieces.append(_read_rows(place.path, name, first + at, stop + at))
                stop = first
            prompt_key = place.parent_key
        return torch.cat(pieces[::-1])


def _read_rows(path: Path, name: str, start: int, stop: int) -> torch.Tensor:
    try:
        with safe_open(path, "pt") as file:
            rows: torch.Tensor = file.get_slice(name)[start:stop]
            return rows
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} holds no contexts ({error!r}); build the corpus again") from error
