"""Sampling as a pure function of (seed, position, target distribution).

The token at position t is `argmax(log p_t + g_t)` where the Gumbel noise g_t depends on (seed, t, token id) alone. No
generator state is carried along, so the text for a seed is the same with any drafter, any draft length, in one process
or resumed in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dlite_agent.errors import ConfigError

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the target's logits.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the fewest tokens whose probabilities sum to at least top_p; 1 keeps all.
        seed: Names the noise; the same seed gives the same text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; expected 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; expected 0 (keep all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; expected a number above 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        """True if the draw is the argmax."""
        return self.temperature == 0.0


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bits (Steele, Lea, Flood 2014); shifts are made logical by masking."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def gumbel_noise(token_ids: torch.Tensor, *, seed: int, position: int) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for `token_ids` at one position of a seeded text.

    A token's noise does not depend on which other tokens are asked for.
    """
    key = torch.tensor([_signed(seed), _signed(position)], dtype=torch.int64, device=token_ids.device)
    base = _mix(_mix(key[0] + _signed(_GOLDEN)) ^ (key[1] * _signed(_GOLDEN)))
    bits = _mix(base + (token_ids + 1) * _signed(_GOLDEN))
    uniform = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # one bit more would round up to 1
    return -torch.log(-torch.log(uniform))


def apply_bitmask(logits: torch.Tensor, bitmask: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return `logits [vocab]` with the tokens whose bit is not set at minus infinity."""
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
    width = min(allowed.shape[0], bits.shape[0])
    allowed[:width] = torch.from_numpy(bits[:width]).bool()
    return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids that top-k and top-p keep of `logits [vocab]`, and their float64 log-probabilities."""
    log_p = torch.log_softmax(logits.double() / params.temperature, dim=-1)
    if params.top_k == 0 and params.top_p == 1.0:
        ids = torch.arange(log_p.shape[-1], device=log_p.device)
        return ids, log_p
    log_p, ids = torch.sort(log_p, descending=True, stable=True)
    if params.top_k:
        log_p, ids = log_p[: params.top_k], ids[: params.top_k]
        log_p = torch.log_softmax(log_p, dim=-1)
    if params.top_p < 1.0:
        mass_before = torch.cumsum(log_p.exp(), dim=-1) - log_p.exp()
        kept = max(1, int((mass_before < params.top_p).sum()))
        log_p, ids = log_p[:kept], ids[:kept]
    return ids, log_p


def draw(
    logits: torch.Tensor, params: SamplingParams, *, position: int, bitmask: npt.NDArray[np.int32] | None = None
) -> int:
    """Draw the token at `position` from the target's `logits [vocab]` under an optional grammar mask."""
    if bitmask is not None:
        logits = apply_bitmask(logits, bitmask)
    if params.is_greedy:
        return int(torch.argmax(logits))
    ids, log_p = kept_tokens(logits, params)
    noise = gumbel_noise(ids, seed=params.seed, position=position)
    return int(ids[torch.argmax(log_p + noise)])
