"""From answers on disk to batches of anchors: shuffled, with a few shards in memory, and able to go on anywhere.

An anchor is a place j of an answer at which a draft begins: y_j is known, y_{j+1} .. y_{j+K} are to be drafted from the
hidden states of the row before y_j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from dlite_agent.engine.sampling import derived_seed
from dlite_agent.errors import ConfigError
from dlite_agent.train.contexts import ContextReader
from dlite_agent.train.shards import Shard, read_manifest, read_shard


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, for drafters that read it all.

    Attributes:
        ids: `[n]`, the tokens.
        features: `[rows, S, d]` bf16, of the rows from `first_row` to the one before the last token.
        positions: Of the anchors, ascending.
        first_row: Position of the first row of `features`; rows before it are not read.
    """

    ids: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor
    first_row: int = 0

    def to(self, device: torch.device) -> Text:
        """Return the text on a device."""
        return Text(self.ids.to(device), self.features.to(device), self.positions.to(device), self.first_row)

    def blurred(self, deviation: float, generator: torch.Generator) -> Text:
        """Return the text with noise on its features; see `Batch.blurred`."""
        return replace(self, features=_blurred(self.features, deviation, generator))


@dataclass(frozen=True, slots=True)
class Batch:
    """B anchors.

    Attributes:
        pivot: `[B, S, d]` fp32.
        anchors: `[B, 2]`, the predecessor and the anchor.
        tokens: `[B, K]`, what was written behind the anchor.
        labels: `[B, K]`, the target's likeliest tokens there.
        top_ids: `[B, K, 16]`, its likeliest tokens.
        top_logprobs: `[B, K, 16]`, and their log-probabilities.
        is_there: `[B, K]`, false behind the answer's end, where the rest holds anything.
        texts: Where the anchors stand, those of each text together; empty if nobody reads them.
    """

    pivot: torch.Tensor
    anchors: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    is_there: torch.Tensor
    texts: tuple[Text, ...] = ()

    def __len__(self) -> int:
        return len(self.pivot)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        tensors = {
            f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self) if f.name != "texts"
        }
        return Batch(**tensors, texts=tuple(text.to(device) for text in self.texts))

    def blurred(self, deviation: float, generator: torch.Generator) -> Batch:
        """Return the batch with normal noise on what the target computed, so that no row is met twice.

        Args:
            deviation: The noise's, as a share of each row's root mean square; 0 for none.
            generator: Draws it, on the CPU.
        """
        if not deviation:
            return self
        texts = tuple(text.blurred(deviation, generator) for text in self.texts)
        return replace(self, pivot=_blurred(self.pivot, deviation, generator), texts=texts)


def _blurred(features: torch.Tensor, deviation: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(features.shape, generator=generator).to(features.device)
    scale = features.float().square().mean(dim=-1, keepdim=True).sqrt()
    return (features + deviation * scale * noise).to(features.dtype)


@dataclass(slots=True)
class Position:
    """Where in the stream a run is: epoch, group of shards, batch of the group."""

    epoch: int = 0
    group: int = 0
    batch: int = 0


class AnchorTable:
    """All anchors of some shards, to be gathered in any order."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Put shards side by side; costs their size in memory."""
        self._rows = {name: torch.cat([shard.rows[name] for shard in shards]) for name in shards[0].rows}
        starts = torch.tensor([0, *(len(shard.rows["tokens"]) for shard in shards)]).cumsum(0)
        begins = torch.cat([shard.offsets[:-1] + start for shard, start in zip(shards, starts, strict=False)])
        ends = torch.cat([shard.offsets[1:] + start for shard, start in zip(shards, starts, strict=False)])
        tails = torch.cat([shard.facts["prompt_tail"] for shard in shards])
        self._keys = torch.cat([shard.facts["prompt_key"] for shard in shards]).tolist()
        self._bounds = list(zip(begins.tolist(), ends.tolist(), strict=True))
        counts = (ends - begins - 1).clamp(min=0)  # nothing is drafted behind an answer's last token
        self._counts = counts
        answer = torch.repeat_interleave(torch.arange(len(begins)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self._at = begins[answer] + torch.arange(len(answer)) - first  # row of each anchor
        self._end = ends[answer]
        before = self._rows["tokens"].long()[(self._at - 1).clamp(min=0)]
        self._before = torch.where(self._at == begins[answer], tails[answer], before)

    def __len__(self) -> int:
        return len(self._at)

    def places(self) -> tuple[list[int], list[int]]:
        """Return the index of each answer's first anchor, and how many it has."""
        return (self._counts.cumsum(0) - self._counts).tolist(), self._counts.tolist()

    def gather_answers(
        self, answers: Sequence[int], *, num_drafts: int, reader: ContextReader | None, look_back: int | None = None
    ) -> Batch:
        """Return all anchors of some answers, with their texts if there is a reader of contexts.

        Args:
            answers: Indices.
            num_drafts: K.
            reader: Where the prompts are.
            look_back: Rows before the first pivot whose features are read; None for all.

        Raises:
            ConfigError: If a prompt is not there.
        """
        starts, counts = self.places()
        indices = torch.cat([torch.arange(starts[i], starts[i] + counts[i]) for i in answers])
        batch = self.gather(indices, num_drafts=num_drafts)
        if reader is None:
            return batch
        return replace(batch, texts=tuple(self._text(i, counts[i], reader, look_back) for i in answers))

    def _text(self, answer: int, count: int, reader: ContextReader, look_back: int | None) -> Text:
        key, (begin, end) = self._keys[answer], self._bounds[answer]
        if key not in reader:
            raise ConfigError("the corpus lacks a prompt of its answers; build it with `dlite-agent corpus --contexts`")
        prompt = reader.ids(key)
        first_row = 0 if look_back is None else max(0, len(prompt) - 1 - look_back)
        # The prompt's last row is the answer's first one.
        features = torch.cat([reader.features(key, first_row), self._rows["features"][begin + 1 : end]])
        ids = torch.cat([prompt, self._rows["tokens"][begin:end]]).long()
        return Text(ids, features, torch.arange(len(prompt), len(prompt) + count), first_row)

    def gather(self, indices: torch.Tensor, *, num_drafts: int) -> Batch:
        """Return the anchors at `indices [B]`."""
        at, end, rows = self._at[indices], self._end[indices].unsqueeze(-1), self._rows
        behind = at.unsqueeze(-1) + torch.arange(1, num_drafts + 1)
        is_there = behind < end
        behind = torch.minimum(behind, end - 1)
        return Batch(
            pivot=rows["features"][at].float(),
            anchors=torch.stack([self._before[indices], rows["tokens"][at].long()], dim=1),
            tokens=rows["tokens"][behind].long(),
            labels=rows["labels"][behind].long(),
            top_ids=rows["top_ids"][behind].long(),
            top_logprobs=rows["top_logprobs"][behind].float(),
            is_there=is_there,
        )


class AnchorStream:
    """Endless batches over a corpus. Each epoch has its own order; within it each anchor comes once.

    The order of shards is random, and so is that of the anchors of each few shards that are in memory together.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        batch_size: int,
        num_drafts: int,
        num_resident: int,
        seed: int,
        reader: ContextReader | None = None,
        look_back: int | None = None,
    ) -> None:
        """Read a corpus.

        Args:
            paths: Its shards.
            batch_size: Anchors in a batch; with texts a batch holds whole answers, at least so many anchors.
            num_drafts: K.
            num_resident: Shards in memory at once.
            seed: Of the order.
            reader: Where the prompts are, for batches with texts.
            look_back: See `AnchorTable.gather_answers`.

        Raises:
            ConfigError: If there is nothing to read.
        """
        if not paths:
            raise ConfigError("the corpus holds no answers; build it first with `dlite-agent corpus`")
        self._paths = list(paths)
        self._batch_size = batch_size
        self._num_drafts = num_drafts
        self._num_resident = num_resident
        self._seed = seed
        self._reader = reader
        self._look_back = look_back

    def batches(self, position: Position) -> Iterator[Batch]:
        """Yield batches from a position on; `position` is moved to the batch after the one yielded before it is."""
        return (gather() for gather in self.unread(position))

    def unread(self, position: Position) -> Iterator[Callable[[], Batch]]:
        """Do as `batches`; each batch is read when it is called for."""
        while True:
            groups = self._groups(position.epoch)
            while position.group < len(groups):
                yield from self._group(groups[position.group], position)
                position.group, position.batch = position.group + 1, 0
            position.epoch, position.group = position.epoch + 1, 0

    def _groups(self, epoch: int) -> list[list[Path]]:
        order = torch.randperm(len(self._paths), generator=self._generator(epoch, 0)).tolist()
        paths = [self._paths[index] for index in order]
        return [paths[start : start + self._num_resident] for start in range(0, len(paths), self._num_resident)]

    def _group(self, paths: Sequence[Path], position: Position) -> Iterator[Callable[[], Batch]]:
        table = AnchorTable([read_shard(path) for path in paths])
        generator = self._generator(position.epoch, position.group + 1)
        chunks = self._mixed(table, generator) if self._reader is None else self._whole_answers(table, generator)
        while position.batch < len(chunks):
            chunk = chunks[position.batch]
            position.batch += 1
            yield chunk

    def _mixed(self, table: AnchorTable, generator: torch.Generator) -> list[Callable[[], Batch]]:
        chunks = torch.split(torch.randperm(len(table), generator=generator), self._batch_size)
        return [partial(table.gather, chunk, num_drafts=self._num_drafts) for chunk in chunks]

    def _whole_answers(self, table: AnchorTable, generator: torch.Generator) -> list[Callable[[], Batch]]:
        _, counts = table.places()
        chunks: list[list[int]] = []
        room = 0
        for answer in torch.randperm(len(counts), generator=generator).tolist():
            if not counts[answer]:
                continue
            if room <= 0:
                chunks.append([])
                room = self._batch_size
            chunks[-1].append(answer)
            room -= counts[answer]
        gather = partial(
            table.gather_answers, num_drafts=self._num_drafts, reader=self._reader, look_back=self._look_back
        )
        return [partial(gather, chunk) for chunk in chunks]

    def _generator(self, epoch: int, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self._seed, f"epoch {epoch}", purpose))


def num_anchors(folder: Path, *, num_shards: int | None = None) -> int:
    """Return how many anchors a corpus has, from its manifest."""
    entries = read_manifest(folder)[:num_shards]
    return sum(entry["num_tokens"] - entry["num_answers"] for entry in entries)


def frequent_tokens(paths: Sequence[Path], *, count: int, vocab_size: int) -> torch.Tensor:
    """Return the `count` tokens that the target wrote or would have written most often, ascending, int32.

    If there are fewer, tokens with small ids fill up: tokenizers learn frequent words first.
    """
    counts = torch.zeros(vocab_size)
    for path in paths:
        shard = read_shard(path)
        for name in ("tokens", "labels"):
            counts += torch.bincount(shard.rows[name].long(), minlength=vocab_size)
    preferred = counts - torch.arange(vocab_size) / (vocab_size + 1)  # of equals the smaller id
    return preferred.topk(count).indices.sort().values.int()
