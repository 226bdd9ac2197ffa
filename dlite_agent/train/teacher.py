"""The teacher of a DLite drafter: the same network, which also sees a window of rows before the pivot.

It is trained first, like a drafter. A student that sees the pivot alone then learns from what the teacher makes of
the window: at first to match its logits, head copied and frozen, later more and more from the target itself.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from dlite_agent.drafters.dlite import DLiteConfig, DLiteModel
from dlite_agent.drafters.layers import RMSNorm, Rope, rope_tables
from dlite_agent.errors import ConfigError
from dlite_agent.train.anchors import Batch

_WEIGHTS = "teacher.safetensors"
_NUM_FUSED = 3  # first, middle and last of the feature layers


class Teacher(nn.Module):
    """A DLite network with W more context slots, one for each row of the window, at the positions before the block."""

    def __init__(self, config: DLiteConfig, *, window: int) -> None:
        super().__init__()
        self.net = DLiteModel(config)
        self.window = window
        self.window_fuse = nn.Linear(_NUM_FUSED * config.hidden_size, config.hidden_size, bias=False)
        self.window_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def hidden(
        self,
        pivot: torch.Tensor,
        windows: torch.Tensor,
        is_there: torch.Tensor,
        anchors: torch.Tensor,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        """Return the block's hidden states `[B, K, d]`.

        Args:
            pivot: `[B, S, d]`.
            windows: `[B, W, S, d]`, the rows before the pivot, the last one next to it.
            is_there: `[B, W]`, false where the text has no such row.
            anchors: `[B, G]`, the newest tokens, the anchor last.
            embedding: `[vocab, d]`, the target's.
        """
        config = self.net.config
        num_features = windows.shape[2]
        fused = self.window_fuse(windows[:, :, [0, num_features // 2, num_features - 1]].flatten(2))
        context = torch.cat([self.window_norm(fused), self.net.context(pivot)], dim=1)
        block = torch.arange(config.anchor_group_size + config.num_drafts, device=pivot.device)
        before = torch.arange(-self.window, 0, device=pivot.device)

        def tables(positions: torch.Tensor) -> Rope:
            return rope_tables(positions, head_dim=config.head_dim, theta=config.rope_theta, dtype=context.dtype)

        rope = tables(torch.cat([before, block.new_zeros(num_features), block]))
        others = is_there.new_ones(len(is_there), num_features + len(block))
        mask = torch.cat([is_there, others], dim=1)[:, None, None, :]
        return self.net.block(context, rope, tables(block), anchors, embedding, mask)

    def write(self, folder: Path) -> None:
        """Write the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / _WEIGHTS)

    def read(self, folder: Path) -> None:
        """Take over weights that were written.

        Raises:
            ConfigError: If they are not there, or those of another shape.
        """
        try:
            self.load_state_dict(load_file(folder / _WEIGHTS))
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{folder} holds no teacher of this shape ({reason}); train one with --config kind=teacher"
            ) from error


def window_rows(batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows before each pivot, `[B, W, S, d]` in the pivot's type, and `[B, W]`, whether they are there."""
    windows, there = [], []
    for text in batch.texts:
        padded = functional.pad(text.features, (0, 0, 0, 0, window, 0))
        offsets = torch.arange(window, device=padded.device)
        starts = text.positions - 1 - window - text.first_row  # of the window, in rows of `features`
        rows = starts.unsqueeze(1) + offsets
        windows.append(padded[(rows + window).clamp(min=0)])
        there.append(rows >= 0)
    return torch.cat(windows).to(batch.pivot.dtype), torch.cat(there)


def teacher_weight(progress: float, *, distill: float, transition: float) -> float:
    """Return how much the teacher counts: all through the first share of a run, then ever less along a cosine."""
    if progress < distill:
        return 1.0
    if progress >= distill + transition:
        return 0.0
    return 0.5 * (1 + math.cos(math.pi * (progress - distill) / transition))


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) `[B, K]` of logits `[B, K, V_d]`."""
    log_p, log_q = (torch.log_softmax(logits.float(), dim=-1) for logits in (teacher, student))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
