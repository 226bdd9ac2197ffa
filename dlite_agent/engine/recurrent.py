"""Sessions of models whose layers carry a state that cannot be cropped: short convolutions and gated delta rules.

Such a state sums up every row before it, so going back takes the state as it was there: a checkpoint. Two things keep
that cheap. Layers here never change a state in place, so a checkpoint is a reference to what is there anyway. And the
state of a short convolution is nothing but its last inputs: a few more of them are kept, and it goes back that far to
any row.

    cache.checkpoint()          before a verify pass; replaces the one before the last pass
    cache.checkpoint(keep=True) at the end of a prompt; the newest four stay
    cache.crop_to(n)            at most n rows are left: the caller runs the rest again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from dlite_agent.engine.cache import SlabCache
from dlite_agent.errors import UnsupportedModelError

MAX_KEPT_CHECKPOINTS = 4
MAX_REWIND = 64  # rows a short convolution goes back without a checkpoint: more than any draft has
CONVOLUTION = "conv"
DELTA_RULE = "linear_attention"
RECURRENT_LAYER_TYPES = frozenset({CONVOLUTION, DELTA_RULE})


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer carries from row to row; the tensors are never changed in place.

    Attributes:
        num_rows: Rows it has seen.
        inputs: The convolution's last inputs `[batch, channels, rows]`, at least its kernel's width of them (or all).
        memory: The delta rule's matrices `[batch, heads, key_dim, value_dim]`, where the layer has one.
    """

    num_rows: int = 0
    inputs: torch.Tensor | None = None
    memory: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what takes memory."""
        return [tensor for tensor in (self.inputs, self.memory) if tensor is not None]


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """The state of one layer, under transformers' interface for layers without a sequence dimension.

    transformers' own layer overwrites its state in place on every pass of one row. This one says that it records the
    past, which makes the models hand every pass to `update_conv_state`.
    """

    def __init__(self, *, has_memory: bool) -> None:
        """Start empty; `has_memory` tells a delta rule from a bare convolution."""
        super().__init__()
        self.record_past = True
        self._has_memory = has_memory
        self._kernel_size = 0
        self._state = LayerState()
        self._num_memory_rows = 0

    @property
    def num_rows(self) -> int:
        """Rows seen by the convolution."""
        return self._state.num_rows

    @property
    def state(self) -> LayerState:
        """What the layer carries now."""
        return self._state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a state is made by the first rows."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> torch.Tensor:
        """Take new inputs `[batch, channels, n]`; return them behind those that their convolution still sees."""
        before = self._state.inputs
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self._kernel_size = conv_kernel_size
        kept = conv_kernel_size + (0 if self._has_memory else MAX_REWIND)
        inputs = seen[..., -kept:].clone() if seen.shape[-1] > kept else seen
        num_new = conv_states.shape[-1]
        self._become(LayerState(self.num_rows + num_new, inputs, self._state.memory))
        return seen[..., -(num_new + conv_kernel_size) :]

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take the delta rule's matrices behind the rows that `update_conv_state` just took."""
        self._become(LayerState(self.num_rows, self._state.inputs, recurrent_states))
        self._num_memory_rows = self.num_rows
        return recurrent_states

    def reset(self) -> None:
        """Forget every row."""
        self.restore(LayerState())

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: layers go back together, by `RecurrentCache.crop_to`."""
        raise UnsupportedModelError("one recurrent layer cannot be cropped alone; use RecurrentCache.crop_to")

    def can_go_to(self, num_rows: int) -> bool:
        """Tell whether the layer can stand behind its first `num_rows` rows without a checkpoint."""
        state = self._state
        if num_rows == 0:
            return True
        if self._has_memory or num_rows > state.num_rows or state.inputs is None:
            return num_rows == state.num_rows == self._num_memory_rows
        first = state.num_rows - state.inputs.shape[-1]
        return first == 0 or num_rows - first >= self._kernel_size

    def go_to(self, num_rows: int) -> None:
        """Stand behind the first `num_rows` rows, where `can_go_to` allows it."""
        state = self._state
        if num_rows == 0:
            self.reset()
        elif num_rows < state.num_rows:
            assert state.inputs is not None and not self._has_memory
            inputs = state.inputs[..., : num_rows - state.num_rows]
            self._become(LayerState(num_rows, inputs))

    def compact_state(self) -> LayerState:
        """Return the present state without the inputs that are only there to go back."""
        state = self._state
        if state.inputs is None or state.inputs.shape[-1] <= self._kernel_size:
            return state
        return LayerState(state.num_rows, state.inputs[..., -self._kernel_size :].clone(), state.memory)

    def restore(self, state: LayerState) -> None:
        """Go back to a state that the layer once had."""
        self._become(state)
        self._num_memory_rows = state.num_rows

    def _become(self, state: LayerState) -> None:
        """Change the state, here and where transformers looks for it."""
        self._state = state
        self.conv_states[0] = state.inputs
        self.recurrent_states[0] = state.memory
        self.has_previous_state[0] = state.num_rows > 0


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    num_rows: int
    states: tuple[LayerState, ...]


class RecurrentCache(SlabCache):
    """The cache of one session of a model with recurrent layers: slabs where it attends, states elsewhere.

    Checkpoints: row 0, the newest plain one, and the newest `MAX_KEPT_CHECKPOINTS` made with `keep=True`. Each takes as
    much memory as the states of all layers: `kernel * channels` numbers per layer, and for a delta rule
    `heads * key_dim * value_dim` more (Qwen3.5-9B in fp32: 50 MB in all, as much as 770 rows of its attention). What
    checkpoints share with each other and with the present state is there once. A bare convolution also holds its last
    `MAX_REWIND` inputs.
    """

    def __init__(self, layer_types: Sequence[str], *, device: torch.device | None = None) -> None:
        """Start empty.

        Args:
            layer_types: The model's kinds of layers; those in `RECURRENT_LAYER_TYPES` carry a state.
            device: As for `SlabCache`.
        """
        super().__init__(sum(kind not in RECURRENT_LAYER_TYPES for kind in layer_types), device=device)
        slabs = iter(self._slabs)
        self._recurrent: list[RecurrentLayer] = []
        layers: list[Any] = []
        for kind in layer_types:
            if kind in RECURRENT_LAYER_TYPES:
                self._recurrent.append(RecurrentLayer(has_memory=kind == DELTA_RULE))
                layers.append(self._recurrent[-1])
            else:
                layers.append(next(slabs))
        self.layers = layers
        self._newest: _Checkpoint | None = None
        self._kept: deque[_Checkpoint] = deque(maxlen=MAX_KEPT_CHECKPOINTS)

    @property
    def nbytes(self) -> int:
        """Bytes allocated: slabs, present states and checkpoints."""
        states = [layer.state for layer in self._recurrent]
        states += [state for point in self._checkpoints() for state in point.states]
        storages = [tensor.untyped_storage() for state in states for tensor in state.tensors()]
        return super().nbytes + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def checkpoint(self, *, keep: bool = False) -> None:
        """Remember the present row, to come back to; no copy is made of a delta rule's state.

        Args:
            keep: Make it one of the few that last until they are cropped away; otherwise the next one replaces it.
        """
        assert all(layer.num_rows == self.num_rows for layer in self._recurrent)
        point = _Checkpoint(self.num_rows, tuple(layer.compact_state() for layer in self._recurrent))
        if not keep:
            self._newest = point
        elif point.num_rows not in {kept.num_rows for kept in self._kept}:
            self._kept.append(point)

    def crop_to(self, num_rows: int) -> None:
        """Keep at most the first `num_rows` rows: as many as the layers can stand at, alone or by a checkpoint."""
        held = [slab.num_rows for slab in self._slabs] + [layer.num_rows for layer in self._recurrent]
        stop = max(0, min(num_rows, *held))
        if all(layer.can_go_to(stop) for layer in self._recurrent):
            for layer in self._recurrent:
                layer.go_to(stop)
        else:
            stop = self._restore(stop)
        super().crop_to(stop)
        if self._newest is not None and self._newest.num_rows > stop:
            self._newest = None
        while self._kept and self._kept[-1].num_rows > stop:
            self._kept.pop()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (transformers' convention), or more."""
        self.crop_to(self.num_rows - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget every row and checkpoint, keep the slabs."""
        self.crop_to(0)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Refuse: the KV rows of some layers do not restore a session.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(_NOT_ROWS)

    def append(self, rows: torch.Tensor) -> None:
        """Refuse, as `rows` does.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(_NOT_ROWS)

    def _checkpoints(self) -> list[_Checkpoint]:
        return [*self._kept, *([] if self._newest is None else [self._newest])]

    def _restore(self, num_rows: int) -> int:
        """Return to the newest checkpoint at or before a row; returns its row."""
        start = _Checkpoint(0, (LayerState(),) * len(self._recurrent))
        usable = [point for point in self._checkpoints() if point.num_rows <= num_rows]
        point = max(usable, key=lambda point: point.num_rows, default=start)
        for layer, state in zip(self._recurrent, point.states, strict=True):
            layer.restore(state)
        return point.num_rows


_NOT_ROWS = (
    "a session of a model with convolution or recurrent state cannot be taken from, or put back by, its KV rows alone; "
    "keep it in memory (see Target.is_restorable) and prefill it again elsewhere"
)
