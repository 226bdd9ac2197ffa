"""The training loop: anchors in, a drafter out; killed at any time it goes on as if nothing had happened.

An output folder holds

    config.json model.safetensors    the drafter (bf16), the best so far by held-out tau
    training.json                    options, seed, corpus, command, commit
    log.csv                          one line per report: losses, accuracy by position, held-out tau
    checkpoint.pt                    everything the run needs to go on; written under another name and renamed
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlite_agent.drafters.draws import likeliest
from dlite_agent.errors import ConfigError
from dlite_agent.train.anchors import AnchorStream, Batch, Position
from dlite_agent.train.config import TrainConfig
from dlite_agent.train.contexts import ContextReader
from dlite_agent.train.evaluate import HeldOut, held_out_tau
from dlite_agent.train.losses import Losses, losses, position_weights, weighted_mean
from dlite_agent.train.options import Plan, RunOptions
from dlite_agent.train.ranks import Ranks
from dlite_agent.train.students import DLiteStudent, Student, TeacherStudent
from dlite_agent.train.teacher import divergence, teacher_weight

CHECKPOINT = "checkpoint.pt"
_LONGEST_STEP_S = 300.0  # a process that was stopped for an hour has not used an hour of its budget


def learning_rate(progress: float, config: TrainConfig) -> float:
    """Return the rate at a share of the run: linear warm-up, then a cosine."""
    if progress < config.warm_up:
        return config.learning_rate * progress / config.warm_up
    angle = math.pi * (progress - config.warm_up) / max(1e-9, 1 - config.warm_up)
    return config.learning_rate * (config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(angle)))


@dataclass
class Trainer:
    """A drafter in training.

    Attributes:
        student: The drafter, on the device where it is trained.
        stream: Where batches come from.
        options: What was asked for; `options.out` is the folder for what the module's docstring lists.
        held_out: Shards of the held-out corpus; empty for none.
        held_out_reader: Where its prompts are, for a student that reads them.
        teacher: What a student listens to at first, or None.
        ranks: The processes that train together.
        facts: What training.json says besides.
    """

    student: Student
    stream: AnchorStream
    config: TrainConfig
    plan: Plan
    options: RunOptions
    held_out: Sequence[Path] = ()
    held_out_reader: ContextReader | None = None
    teacher: TeacherStudent | None = None
    ranks: Ranks = field(default_factory=Ranks)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.step = 0
        self.seconds = 0.0
        self.best_tau = -1.0
        self._position = Position()
        self._generator = torch.Generator().manual_seed(config.seed)
        self._optimizer = torch.optim.AdamW(
            self.student.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._window = _Window(self.student.num_taught)
        self._last_saved = 0.0

    @property
    def device(self) -> torch.device:
        """Where the drafter is."""
        return self.student.draft_to_target.device

    @property
    def progress(self) -> float:
        """How much of the run is over, 0 to 1."""
        return self.plan.progress(step=self.step, seconds=self.seconds)

    def run(self, *, should_stop: Callable[[], bool] = lambda: False, say: Callable[[str], None] = print) -> None:
        """Train to the plan's end, or until asked to stop; either way a checkpoint is left to go on from."""
        if self.ranks.is_first:
            self.options.out.mkdir(parents=True, exist_ok=True)
            self._write_facts()
        batches = self.stream.unread(self._position)
        is_stopped = bool(self.ranks.agree([should_stop()])[0])
        while self.progress < 1 and not is_stopped:
            start = time.monotonic()
            own = [next(batches) for _ in range(self.ranks.count)][self.ranks.rank]
            self._window.add(self._learn(own()))
            if self.step % self.options.report_every == 0:
                self._report(say)
            seconds = self.seconds + min(time.monotonic() - start, _LONGEST_STEP_S)
            self.seconds, is_stopped = self._agree(seconds, should_stop())
            if self.seconds - self._last_saved >= self.options.checkpoint_seconds:
                self.save()
        if self.progress >= 1 and self._window.num_steps:
            self._report(say)
        self.save()

    def _agree(self, seconds: float, is_stopped: bool) -> tuple[float, bool]:
        """Take over the time and the decision of the first process, so that all end in the same step."""
        agreed = self.ranks.agree([seconds, is_stopped])
        return agreed[0], bool(agreed[1])

    def _learn(self, batch: Batch) -> Losses:
        """Take one step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.progress, self.config)
        batch = batch.to(self.device).blurred(self.config.feature_noise, self._generator)
        self._free_head(self._teacher_weight() < 1)
        with self._autocast():
            result = self._losses(batch)
        self._optimizer.zero_grad(set_to_none=True)
        result.total.backward()  # type: ignore[no-untyped-call]
        self.ranks.average_gradients(self.student.model)
        nn.utils.clip_grad_norm_(self.student.model.parameters(), self.config.clip)
        self._optimizer.step()
        self.step += 1
        return result

    def _losses(self, batch: Batch) -> Losses:
        hidden = self.student.hidden(batch)
        logits, confidence = self.student.logits(hidden, batch, self._drafted(batch, hidden))
        confidence = confidence if self.config.has_confidence else None
        result = losses(logits, confidence, batch, draft_to_target=self.student.draft_to_target, config=self.config)
        weight = self._teacher_weight()
        if self.teacher is None or not weight:
            return result
        with torch.no_grad():
            taught, _ = self.teacher.logits(self.teacher.hidden(batch), batch, batch.tokens)
        gap = weighted_mean(divergence(taught, logits), position_weights(batch, self.config))
        return replace(result, total=weight * gap + (1 - weight) * result.total)

    def _teacher_weight(self) -> float:
        if self.teacher is None:
            return 0.0
        return teacher_weight(self.progress, distill=self.config.distill, transition=self.config.transition)

    def _free_head(self, is_free: bool) -> None:
        """Let the head learn, or keep it as the teacher's."""
        if self.teacher is not None and isinstance(self.student, DLiteStudent):
            self.student.model.sequential_head.requires_grad_(is_free)

    @torch.no_grad()
    def _drafted(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Return the drafted tokens to teach with: what was written, late in the run sometimes the head's own."""
        share = self.config.scheduled_sampling * max(0.0, 2 * self.progress - 1)
        if not share:
            return batch.tokens
        logits, _ = self.student.logits(hidden, batch, batch.tokens)
        is_own = torch.rand(batch.tokens.shape, generator=self._generator).to(self.device) < share
        return torch.where(is_own, likeliest(logits, self.student.draft_to_target), batch.tokens)

    def _autocast(self) -> AbstractContextManager[Any]:
        is_half = self.config.is_half(self.device)
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if is_half else nullcontext()

    def _report(self, say: Callable[[str], None]) -> None:
        """Write a line of the log and say it; keep the drafter if it is the best so far."""
        if not self.ranks.is_first:
            return
        held_out = None
        if self.held_out:
            held_out = held_out_tau(
                self.student,
                self.held_out,
                device=self.device,
                reader=self.held_out_reader,
                max_answers=self.options.max_held_out,
            )
        if held_out is None or held_out.tau > self.best_tau:
            self.best_tau = held_out.tau if held_out else self.best_tau
            self._keep()
        row = {
            "step": self.step,
            "epoch": self._position.epoch,
            "seconds": round(self.seconds, 1),
            "learning_rate": learning_rate(self.progress, self.config),
            **self._window.take(),
            **_held_out_fields(held_out, self.student.num_drafts),
        }
        _append_row(self.options.out / "log.csv", row)
        shown = ("step", "loss", "ce", "tv", "accuracy_1", "held_out_tau", "anchors_per_s")
        say(", ".join(f"{name} {_short(row[name])}" for name in shown))

    def _keep(self) -> None:
        """Write the drafter, each file under another name first."""
        partial = self.options.out / "partial"
        names = self.facts.get("target_names", ())
        self.student.write(partial, target_names=names)
        for path in partial.iterdir():
            path.replace(self.options.out / path.name)
        partial.rmdir()

    def save(self) -> None:
        """Write a checkpoint: weights, optimizer, random state, position."""
        self._last_saved = self.seconds
        if not self.ranks.is_first:
            return
        content = {
            "config": asdict(self.config),
            "corpus": self.facts.get("corpus"),
            "model": self.student.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "position": asdict(self._position),
            "step": self.step,
            "seconds": self.seconds,
            "best_tau": self.best_tau,
            "window": self._window.state(),
        }
        partial = self.options.out / f"{CHECKPOINT}.partial"
        torch.save(content, partial)
        partial.replace(self.options.out / CHECKPOINT)

    def resume(self) -> None:
        """Go on from the checkpoint in the output folder.

        Raises:
            ConfigError: If there is none, or it is of a run with other options or of another corpus.
        """
        content = read_checkpoint(self.options.out)
        for name, wanted in (("config", asdict(self.config)), ("corpus", self.facts.get("corpus"))):
            if content[name] != wanted:
                raise ConfigError(f"{self.options.out} was trained with {name} {content[name]}, asked for was {wanted}")
        self.student.model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._generator.set_state(content["generator"].cpu())
        self._position = Position(**content["position"])
        self._window = _Window.of(content["window"])
        self.step, self.seconds, self.best_tau = content["step"], content["seconds"], content["best_tau"]
        self._last_saved = self.seconds
        _cut_log(self.options.out / "log.csv", after=self.step)

    def _write_facts(self) -> None:
        content = {"config": asdict(self.config), "plan": asdict(self.plan), **self.facts}
        (self.options.out / "training.json").write_text(json.dumps(content, indent=1) + "\n")


def read_checkpoint(out: Path) -> dict[str, Any]:
    """Return the content of an output folder's checkpoint.

    Raises:
        ConfigError: If there is none that can be read.
    """
    try:
        content: dict[str, Any] = torch.load(out / CHECKPOINT, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many types for a damaged file
        raise ConfigError(f"{out / CHECKPOINT} cannot be read ({error}); start without --resume") from error
    return content


class _Window:
    """Sums of what happened since the last report."""

    def __init__(self, num_drafts: int) -> None:
        self._start_afresh(num_drafts)

    def _start_afresh(self, num_drafts: int) -> None:
        self.num_steps = 0
        self._started = time.monotonic()
        self._num_timed = 0
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._right = torch.zeros(num_drafts, dtype=torch.int64)
        self._there = torch.zeros(num_drafts, dtype=torch.int64)

    def add(self, result: Losses) -> None:
        values = [result.total.detach(), result.ce, result.tv, result.confidence]
        self._sums += torch.stack([value.float() for value in values]).double().cpu()
        self._right += result.num_right.cpu()
        self._there += result.num_there.cpu()
        self.num_steps += 1
        self._num_timed += int(result.num_there[0]) if len(result.num_there) else 0

    def take(self) -> dict[str, float]:
        """Return the means, and start afresh."""
        seconds = max(1e-9, time.monotonic() - self._started)
        means = (self._sums / max(1, self.num_steps)).tolist()
        fields = dict(zip(("loss", "ce", "tv", "confidence"), means, strict=True))
        rates = (self._right / self._there.clamp(min=1)).tolist()
        fields |= {f"accuracy_{k}": rate for k, rate in enumerate(rates, start=1)}
        fields["anchors_per_s"] = self._num_timed / seconds
        self._start_afresh(len(self._right))
        return fields

    def state(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "sums": self._sums, "right": self._right, "there": self._there}

    @classmethod
    def of(cls, state: dict[str, Any]) -> _Window:
        window = cls(len(state["right"]))
        window.num_steps = state["num_steps"]
        window._sums, window._right, window._there = state["sums"], state["right"], state["there"]
        return window


def _held_out_fields(held_out: HeldOut | None, num_drafts: int) -> dict[str, float]:
    rates = held_out.accepted_at if held_out else (math.nan,) * num_drafts
    accepted = {f"held_out_accepted_{k}": rate for k, rate in enumerate(rates, start=1)}
    return {"held_out_tau": held_out.tau if held_out else math.nan, **accepted}


def _append_row(path: Path, row: dict[str, float]) -> None:
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if is_new:
            writer.writeheader()
        writer.writerow({name: _short(value) for name, value in row.items()})


def _cut_log(path: Path, *, after: int) -> None:
    """Drop lines of steps that the checkpoint does not know; they will be written again."""
    if not path.is_file():
        return
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names, rows = reader.fieldnames or (), [row for row in reader if int(row["step"]) <= after]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(names))
        writer.writeheader()
        writer.writerows(rows)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
