"""Checks a DLite checkpoint folder against the inputs and outputs recorded beside it (io.safetensors)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dlite_agent.drafters import checkpoint
from dlite_agent.errors import DrafterFormatError

TOLERANCE = 1e-4
_NAMES = (
    "pivot_hidden",
    "anchor_token",
    "predecessor_token",
    "target_embedding",
    "draft_hidden",
    "forced_tokens",
    "forced_logits",
    "greedy_logits",
    "greedy_drafts",
)


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """Largest absolute errors, and whether the greedy drafts are the recorded ones."""

    hidden_error: float
    forced_logits_error: float
    greedy_logits_error: float
    drafts_equal: bool

    @property
    def passed(self) -> bool:
        """True if all errors are within `TOLERANCE` and the drafts equal."""
        worst = max(self.hidden_error, self.forced_logits_error, self.greedy_logits_error)
        return worst <= TOLERANCE and self.drafts_equal


def _read_io(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "io.safetensors"
    try:
        recorded: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DrafterFormatError(
            f"{path} cannot be read ({error}); expected the recorded inputs and outputs"
        ) from error
    if missing := [name for name in _NAMES if name not in recorded]:
        raise DrafterFormatError(f"{path} lacks {missing}")
    return recorded


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        raise DrafterFormatError(f"recorded output has shape {list(expected.shape)}; the model gives {list(got.shape)}")
    return float((got.float() - expected.float()).abs().max())


@torch.inference_mode()
def check(folder: Path) -> GoldenReport:
    """Run a checkpoint on its recorded inputs.

    Raises:
        DrafterFormatError: If the checkpoint or the recording cannot be read.
    """
    model = checkpoint.load(folder, dtype=torch.float32).eval()
    io = _read_io(folder)
    tokens = [io["anchor_token"]]
    if model.config.anchor_group_size == 2:
        tokens.insert(0, io["predecessor_token"])
    anchors = torch.stack(tokens, dim=1)
    embedding, pivot = io["target_embedding"].float(), io["pivot_hidden"].float()
    hidden = model.hidden(pivot, anchors, embedding)
    forced = model.forced(hidden, anchors, io["forced_tokens"].unsqueeze(0), embedding)
    drafts, logits = model.greedy(pivot, anchors, embedding, num_tokens=model.config.num_drafts)
    return GoldenReport(
        hidden_error=_error(hidden, io["draft_hidden"]),
        forced_logits_error=_error(forced[0], io["forced_logits"]),
        greedy_logits_error=_error(logits[0], io["greedy_logits"]),
        drafts_equal=torch.equal(drafts[0], io["greedy_drafts"]),
    )
