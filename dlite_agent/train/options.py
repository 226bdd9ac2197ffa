"""What the two commands can be asked for; without torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What decides a corpus, given its prompts and its target.

    Attributes:
        num_samples: Sampled answers to each prompt, besides the greedy one.
        temperature: Of the sampled answers.
        max_tokens: Longest answer.
        max_prompt: Longest prompt that is answered, in tokens.
        seed: Of the samples and of the order of sessions.
        is_held_out: Whether the held-out sessions are answered, for measuring, or the others.
        keeps_contexts: Whether the rows of whole prompts are kept, as drafters with a history need them.
    """

    num_samples: int = 2
    temperature: float = 0.7
    max_tokens: int = 160
    max_prompt: int = 3000
    seed: int = 0
    is_held_out: bool = False
    keeps_contexts: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.temperature <= 0 or self.max_tokens < 1 or self.max_prompt < 1:
            raise ConfigError(f"{self}; expected no negative number of samples, and the others positive")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A training run.

    Attributes:
        target: The model that wrote the corpus.
        corpus: Folder of the corpus.
        out: Folder of the drafter.
        teacher: Folder of a teacher to learn from at first, or None.
        held_out: Folder of a held-out corpus, or None.
        minutes: Train for so long, or None.
        epochs: Train for so many passes over the corpus, or None.
        settings: `name=value` settings of `TrainConfig`.
        report_every: Steps between two lines of the log, with a held-out tau each.
        checkpoint_seconds: Time between two checkpoints.
        max_held_out: Held-out answers to replay each time.
        device: Where to train.
        is_resumed: Whether to go on from the folder's checkpoint.
    """

    target: str
    corpus: Path
    out: Path
    held_out: Path | None = None
    teacher: Path | None = None
    minutes: float | None = None
    epochs: float | None = None
    settings: tuple[str, ...] = ()
    report_every: int = 300
    checkpoint_seconds: float = 180.0
    max_held_out: int = 60
    device: str = "cpu"
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train.

    Attributes:
        num_steps: Steps in all; the learning rate falls over them. None to plan by time alone.
        minutes: Stop after so long, and let the learning rate fall over that time; None for no such bound.
    """

    num_steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps is None and self.minutes is None:
            raise ConfigError("a run without an end; expected a number of epochs or of minutes")

    def progress(self, *, step: int, seconds: float) -> float:
        """Return how much of the run is over, 0 to 1: the larger share where both are bounded."""
        shares = [] if self.num_steps is None else [step / self.num_steps]
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        return min(1.0, max(shares))
