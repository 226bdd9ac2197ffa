"""Answers on disk: what the target wrote, what it would have written, and the hidden states a drafter reads.

A corpus folder holds

    corpus.json                  what it was made of: target, layers, options, seeds, counts
    manifest.jsonl               one line per shard: file, digest, counts, sessions that are done with it
    shard-00000.safetensors ...  about 32 MB each
    context-00000.safetensors    where whole prompts are kept, the rows of those that the shard's answers continue

A row belongs to one generated token y_i: the features and the opinion of the target row that y_i was drawn from. So a
draft behind the anchor y_j has the pivot `features[j]`, the labels `labels[j + 1 ..]`, and nothing is stored twice.

A shard is written under another name, renamed, and then entered into the manifest: whenever a process dies, what the
manifest names is whole, and nothing else counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dlite_agent.errors import ConfigError
from dlite_agent.train.contexts import Context, write_contexts

SHARD_BYTES = 32 << 20
NUM_TOP = 16
_MANIFEST = "manifest.jsonl"
_ABOUT = "corpus.json"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target to one prompt; a row for each generated token.

    Attributes:
        prompt_key: Digest of the prompt's ids.
        session_id: The session whose prompt it was.
        turn: Assistant turns before it.
        num_prompt: Tokens of the prompt.
        prompt_tail: The last prompt token.
        sample: 0 for the greedy answer, whose tokens are the target's likeliest; from 1 on for sampled ones.
        tokens: `[n]` int32, what was generated, the end token included.
        labels: `[n]` int32, the likeliest token at each place.
        features: `[n, S, d]` bf16, of the row before each token.
        top_ids: `[n, 16]` int32, the likeliest tokens at each place, the likeliest first.
        top_logprobs: `[n, 16]` fp16, their log-probabilities.
    """

    prompt_key: int
    session_id: str
    turn: int
    num_prompt: int
    prompt_tail: int
    sample: int
    tokens: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def is_greedy(self) -> bool:
        """Whether the tokens are the target's likeliest."""
        return self.sample == 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk, about."""
        return sum(t.nbytes for t in (self.tokens, self.labels, self.features, self.top_ids, self.top_logprobs))


_ROWS = ("tokens", "labels", "features", "top_ids", "top_logprobs")
_FACTS = ("prompt_key", "turn", "num_prompt", "prompt_tail", "sample")


@dataclass(frozen=True, slots=True)
class Shard:
    """The answers of one file, row by row; answer i has the rows `[offsets[i], offsets[i + 1])`.

    Attributes:
        offsets: `[answers + 1]` int64.
        facts: The numbers of `Answer` by name, int64 `[answers]` each.
        session_ids: Of each answer.
        rows: The tensors of `Answer` by name, over all rows.
    """

    offsets: torch.Tensor
    facts: dict[str, torch.Tensor]
    session_ids: tuple[str, ...]
    rows: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.session_ids)

    def answer(self, index: int) -> Answer:
        """Return views of one answer's rows."""
        start, stop = self.offsets[index].item(), self.offsets[index + 1].item()
        fields: dict[str, Any] = {name: int(values[index]) for name, values in self.facts.items()}
        fields |= {name: tensor[start:stop] for name, tensor in self.rows.items()}
        return Answer(**fields, session_id=self.session_ids[index])


def write_shard(path: Path, answers: Sequence[Answer]) -> str:
    """Write answers to a file, all or nothing; returns its SHA-256."""
    lengths = torch.tensor([0, *(len(answer.tokens) for answer in answers)])
    tensors = {name: torch.cat([getattr(answer, name) for answer in answers]).contiguous() for name in _ROWS}
    tensors |= {name: torch.tensor([int(getattr(answer, name)) for answer in answers]) for name in _FACTS}
    tensors["offsets"] = lengths.cumsum(0)
    metadata = {"sessions": json.dumps([answer.session_id for answer in answers])}
    return _write_whole(path, lambda partial: save_file(tensors, partial, metadata=metadata))


def _write_whole(path: Path, write: Callable[[Path], None]) -> str:
    """Write a file under another name, make it durable, rename it; returns its SHA-256."""
    partial = path.with_suffix(".partial")
    write(partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    partial.replace(path)
    return digest


def read_shard(path: Path) -> Shard:
    """Read a whole shard.

    Raises:
        ConfigError: If it cannot be read as one.
    """
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            session_ids = tuple(json.loads(file.metadata()["sessions"]))
        rows = {name: tensors[name] for name in _ROWS}
        return Shard(tensors["offsets"], {name: tensors[name] for name in _FACTS}, session_ids, rows)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no shard of a corpus ({error!r}); build the corpus again") from error


def read_about(folder: Path) -> dict[str, Any]:
    """Return what a corpus was made of.

    Raises:
        ConfigError: If the folder holds no corpus.
    """
    try:
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_text())
        return about
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no corpus ({error}); build one with `dlite-agent corpus`") from error


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the manifest's entries; a last line that was cut off by a kill does not count."""
    path = folder / _MANIFEST
    if not path.is_file():
        return []
    entries = []
    lines = path.read_text().split("\n")
    for line in lines[:-1]:  # behind the last newline is nothing, or a line that was not finished
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(
                f"{path}: line {len(entries) + 1} is no JSON ({error}); build the corpus again"
            ) from error
    return entries


def shard_paths(folder: Path) -> list[Path]:
    """Return the shards that count, in order."""
    return [folder / entry["file"] for entry in read_manifest(folder)]


def context_paths(folder: Path) -> list[Path]:
    """Return the files of contexts that count, in order."""
    return [folder / entry["context_file"] for entry in read_manifest(folder) if "context_file" in entry]


class CorpusWriter:
    """Adds answers to a corpus folder; one process at a time.

    Attributes:
        finished: Sessions that need no more work.
        complete: Keys of the prompts that need no more answers.
        answers: Tokens of the answers there are, by prompt key and sample.
        contexts: Keys of the prompts whose rows are there.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, shard_bytes: int = SHARD_BYTES) -> None:
        """Start a corpus, or go on with one.

        Args:
            folder: Created if need be.
            about: What decides the corpus; going on needs the same.
            shard_bytes: Size from which on a shard is written.

        Raises:
            ConfigError: If the folder holds another corpus, or another process writes to it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._about = about
        self._shard_bytes = shard_bytes
        self._waiting: list[Answer] = []
        self._waiting_contexts: list[Context] = []
        self._waiting_finished: list[str] = []
        self._waiting_complete: list[int] = []
        self.answers: dict[int, dict[int, list[int]]] = {}
        self._lock = _locked(folder / ".lock")
        try:
            self._check_about()
            self._entries = read_manifest(folder)
            self._rewrite_manifest()
            self.finished = {name for entry in self._entries for name in entry["finished"]}
            self.complete = {key for entry in self._entries for key in entry["complete"]}
            self.contexts = {key for entry in self._entries for key in entry.get("contexts", ())}
            for entry in self._entries:
                for key, sample, tokens in _read_tokens(folder / entry["file"]):
                    self.answers.setdefault(key, {})[sample] = tokens
        except BaseException:
            self._lock.close()
            raise

    def add(self, answer: Answer) -> bool:
        """Take an answer, unless the prompt has the same one already; returns whether it was taken."""
        tokens = answer.tokens.tolist()
        there = self.answers.setdefault(answer.prompt_key, {})
        if tokens in there.values():
            return False
        there[answer.sample] = tokens
        self._waiting.append(answer)
        if sum(waiting.nbytes for waiting in self._waiting) >= self._shard_bytes:
            self.flush()
        return True

    def add_context(self, context: Context) -> None:
        """Take a prompt's rows, to be written no later than the next answer that is added."""
        self.contexts.add(context.prompt_key)
        self._waiting_contexts.append(context)

    def complete_prompt(self, prompt_key: int) -> None:
        """Note that all of a prompt's answers were added."""
        self.complete.add(prompt_key)
        self._waiting_complete.append(prompt_key)

    def finish(self, session_id: str) -> None:
        """Note that all of a session's answers were added."""
        self.finished.add(session_id)
        self._waiting_finished.append(session_id)

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        name = f"shard-{len(self._entries):05d}.safetensors"
        digest = write_shard(self._folder / name, self._waiting)
        entry = {
            "file": name,
            "sha256": digest,
            "num_answers": len(self._waiting),
            "num_tokens": sum(len(answer.tokens) for answer in self._waiting),
            "sessions": sorted({answer.session_id for answer in self._waiting}),
            "finished": self._waiting_finished,
            "complete": self._waiting_complete,
            **self._write_contexts(),
        }
        self._append(entry)
        self._waiting, self._waiting_finished, self._waiting_complete, self._waiting_contexts = [], [], [], []

    def _write_contexts(self) -> dict[str, Any]:
        """Write the rows that wait; returns what the manifest says of them."""
        contexts = self._waiting_contexts
        if not contexts:
            return {}
        name = f"context-{len(self._entries):05d}.safetensors"
        digest = _write_whole(self._folder / name, lambda partial: write_contexts(partial, contexts))
        keys = [context.prompt_key for context in contexts]
        return {"context_file": name, "context_sha256": digest, "contexts": keys}

    def close(self, **counts: Any) -> dict[str, Any]:
        """Write what waits and sum up in corpus.json; returns what stands there."""
        self.flush()
        summary = {
            "num_shards": len(self._entries),
            "num_answers": sum(entry["num_answers"] for entry in self._entries),
            "num_tokens": sum(entry["num_tokens"] for entry in self._entries),
            "num_sessions": len({name for entry in self._entries for name in entry["sessions"]}),
            "digest": hashlib.sha256("".join(entry["sha256"] for entry in self._entries).encode()).hexdigest(),
            **counts,
        }
        about = {**self._about, "counts": summary}
        _write_json(self._folder / _ABOUT, about)
        self._lock.close()
        return about

    def _check_about(self) -> None:
        if not (self._folder / _ABOUT).is_file():
            _write_json(self._folder / _ABOUT, self._about)
            return
        there = read_about(self._folder)
        there.pop("counts", None)
        wanted = json.loads(json.dumps(self._about))
        if there != wanted:
            different = [name for name in {**there, **wanted} if there.get(name) != wanted.get(name)]
            raise ConfigError(
                f"{self._folder} holds a corpus with {different[0]} {there.get(different[0])!r}, asked for was "
                f"{wanted.get(different[0])!r}; take another folder, or the same options"
            )

    def _rewrite_manifest(self) -> None:
        _write(self._folder / _MANIFEST, "".join(json.dumps(entry) + "\n" for entry in self._entries))

    def _append(self, entry: dict[str, Any]) -> None:
        with (self._folder / _MANIFEST).open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._entries.append(entry)


def _locked(path: Path) -> IO[str]:
    """Return a file whose lock is ours until it is closed, or this process ends."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"another process writes to {path.parent}; wait for it, or take another folder") from error
    return file


def _read_tokens(path: Path) -> list[tuple[int, int, list[int]]]:
    """Return prompt key, sample and tokens of a shard's answers, without reading its features."""
    try:
        with safe_open(path, "pt") as file:
            keys, samples, tokens, offsets = (
                file.get_tensor(name) for name in ("prompt_key", "sample", "tokens", "offsets")
            )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no shard of a corpus ({error!r}); build the corpus again") from error
    starts = offsets.tolist()
    each = [tokens[start:stop].tolist() for start, stop in pairwise(starts)]
    return list(zip(keys.tolist(), samples.tolist(), each, strict=True))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all; the folder is locked, so nobody else does."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
