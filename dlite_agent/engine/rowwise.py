"""Passes whose rows must have the very bits that they would have alone.

Exact float32 and int8 targets promise that: logits do not depend on which rows share a pass. Products and attention
see to it themselves (`linear`, `int8`, `attention`), activations here. A prefill is left out: its rows are many, plain
and speculative decoding share it chunk by chunk, and fast kernels may do with it what they like. So modules have to
know what kind of pass is under way; `RowMode` tells them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlite_agent.engine.attention import ROWWISE_MAX_ROWS

if TYPE_CHECKING:
    from dlite_agent.engine.packed import Segment

_ACTIVATION_NAMES = ("act_fn", "activation_fn")


class RowMode:
    """What kind of pass is under way, shared by a target and its modules.

    Attributes:
        is_rowwise: Whether each row must have the bits that it would have alone; so it is outside of passes, too.
    """

    def __init__(self) -> None:
        self.is_rowwise = True

    def watch(self, model: nn.Module) -> None:
        """Learn of every pass of a transformers model as it begins."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        segments: Sequence[Segment] | None = kwargs.get("segments")
        sizes = [segment.num_rows for segment in segments] if segments else [kwargs["input_ids"].shape[1]]
        self.is_rowwise = max(sizes) <= ROWWISE_MAX_ROWS


class RowwiseActivation(nn.Module):
    """An activation applied row by row in a decode pass: kernels compute a tensor's last elements in another way."""

    def __init__(self, activation: nn.Module, mode: RowMode) -> None:
        super().__init__()
        self.activation = activation
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [batch, n, width]`."""
        if x.shape[1] == 1 or not self.mode.is_rowwise:
            whole: torch.Tensor = self.activation(x.contiguous())
            return whole
        return torch.cat([self.activation(row.contiguous()) for row in torch.split(x, 1, dim=1)], dim=1)


def separate_rows(model: nn.Module, mode: RowMode) -> None:
    """Make the activations of a model go row by row in decode passes."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in _ACTIVATION_NAMES:
                setattr(parent, name, RowwiseActivation(child, mode))
