"""Sampling as a pure function of (seed, position, target distribution).

The token at position t is `argmax(log p_t + g_t)` where the Gumbel noise g_t depends on (seed, t, token id) alone. No
generator state is carried along, so the text for a seed is the same with any drafter, any draft length, in one process
or resumed in another.

What depends on the text so far (penalties, bad words, ...) is in `processors`; what is here sees one row of logits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from dlite_agent.bitmask import Bitmask
from dlite_agent.errors import ConfigError, CorruptModelError, DLiteError, GrammarError

Verification = Literal["exact", "rejection"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1
_LARGEST_BIAS = 1e9
_NUCLEUS_HEAD = 1024  # top-p looks at so many tokens before it sorts the whole vocabulary


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the target's logits.

    Logits are processed in this order: repetition penalty, presence and frequency penalty, logit bias, bad words and
    min_tokens, the grammar; then, unless greedy, temperature, top-k, top-p, min-p, each renormalised before the next.
    Greedy takes the argmax of the processed logits.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens (of equals the lower ids); 0 keeps all.
        top_p: Keep the fewest tokens whose probabilities sum to at least top_p; 1 keeps all.
        min_p: Keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        seed: Names the noise; the same seed gives the same text.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or in the text
            generated so far; 1 is off.
        presence_penalty: Subtracted from the logits of tokens generated so far; 0 is off.
        frequency_penalty: Subtracted as often as the token was generated so far; 0 is off.
        logit_bias: Added to the logits of tokens, by id.
        bad_words: Token sequences that are never completed, neither in the text nor across the prompt's end.
        min_tokens: End tokens are impossible before so many tokens were generated, unless the grammar allows nothing
            else.
        top_logprobs: None for no log-probabilities; n for those of each token and of the n best at its place.
        verification: "exact" accepts a drafted token if it is the target's own draw: the text for a seed is the same
            with any drafter. "rejection" accepts with probability min(1, p / q): the distribution is the target's, and
            more drafts are accepted, but the text depends on the drafts. The same when greedy.
    """

    temperature: float = 0.0
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    top_logprobs: int | None = None
    verification: Verification = "exact"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            object.__setattr__(self, "bad_words", tuple(tuple(word) for word in self.bad_words))
            unmet = next(((name, expected) for name, is_met, expected in self._checks() if not is_met), None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a value of another type in {self}: {error}; see SamplingParams") from error
        if unmet is not None:
            name, expected = unmet
            raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {expected}")

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield a setting's name, whether its value can work, and what was expected."""
        yield "temperature", 0.0 <= self.temperature < math.inf, "0 (greedy) or a positive number"
        yield "top_k", isinstance(self.top_k, int) and self.top_k >= 0, "0 (keep all) or a larger integer"
        yield "top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"
        yield "min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 (off) to 1"
        yield "seed", isinstance(self.seed, int), "an integer"
        yield "repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "a positive number (1 is off)"
        yield "presence_penalty", math.isfinite(self.presence_penalty), "a finite number (0 is off)"
        yield "frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number (0 is off)"
        biases_work = all(token >= 0 and abs(bias) <= _LARGEST_BIAS for token, bias in self.logit_bias.items())
        yield "logit_bias", biases_work, "numbers of at most 1e9 by token id (to forbid a token use bad_words)"
        words_work = all(word and min(word) >= 0 for word in self.bad_words)
        yield "bad_words", words_work, "sequences of at least one token id"
        yield "min_tokens", isinstance(self.min_tokens, int) and self.min_tokens >= 0, "an integer, 0 or more"
        yield "top_logprobs", self.top_logprobs is None or self.top_logprobs >= 0, "None, 0 or more"
        yield "verification", self.verification in ("exact", "rejection"), "'exact' or 'rejection'"

    @property
    def is_greedy(self) -> bool:
        """True if the draw is the argmax."""
        return self.temperature == 0.0


def derived_seed(seed: int, purpose: str, index: int = 0) -> int:
    """Return a seed of its own for each (seed, purpose, index), from 0 to 2**63 - 1; `purpose` is at most 16 bytes."""
    text = f"{seed & _MASK_64},{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=purpose.encode()).digest()) >> 1


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice `index` of several for one prompt; choice 0 is what a single one would be."""
    if index < 0:
        raise ConfigError(f"the choice's index is {index}; expected 0 or more")
    return params if index == 0 else replace(params, seed=derived_seed(params.seed, "choice", index))


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bits (Steele, Lea, Flood 2014); shifts are made logical by masking."""
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _mix_key(value: int) -> int:
    """The same on one number, taken modulo 2**64."""
    value &= _MASK_64
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK_64
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK_64
    return value ^ (value >> 31)


def gumbel_noise(token_ids: torch.Tensor, *, seed: int, position: int) -> torch.Tensor:
    """Return standard Gumbel noise, float64, for `token_ids` at one position of a seeded text.

    A token's noise does not depend on which other tokens are asked for.
    """
    base = _mix_key(_mix_key((seed & _MASK_64) + _GOLDEN) ^ (position * _GOLDEN))
    bits = _mix(_signed(base) + (token_ids + 1) * _signed(_GOLDEN))
    uniform = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52  # one bit more would round up to 1
    return -torch.log(-torch.log(uniform))


def allowed_tokens(bitmask: Bitmask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return which of the vocabulary's tokens a grammar allows.

    Raises:
        GrammarError: It allows none.
    """
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(bits)] = bits
    if not allowed.any():
        raise GrammarError(f"the grammar allows none of the {vocab_size} tokens here; expected one at least")
    return allowed


def keep_allowed(logits: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return `logits [vocab]` with minus infinity where `allowed [vocab]` is false."""
    return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)


def apply_bitmask(logits: torch.Tensor, bitmask: Bitmask) -> torch.Tensor:
    """Return `logits [vocab]` with the tokens whose bit is not set at minus infinity.

    Raises:
        GrammarError: No token's bit is set.
    """
    return keep_allowed(logits, allowed_tokens(bitmask, logits.shape[-1]))


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids that top-k, top-p and min-p keep of `logits [vocab]`, and their float64 log-probabilities.

    The log-probabilities are right up to one constant.
    """
    if logits.device.type == "mps":
        logits = logits.cpu()  # no float64 there
    logits = logits.double()
    log_p = torch.log_softmax((logits - logits.max()) / params.temperature, dim=-1)  # no overflow, however cold
    ids = torch.arange(log_p.shape[-1], device=log_p.device)
    if params.top_k:
        ids, log_p = _largest(log_p, params.top_k)
        log_p = torch.log_softmax(log_p, dim=-1)
    if params.top_p < 1.0:
        kept, log_p = _nucleus(log_p, params.top_p)
        ids = ids[kept]
    if params.min_p > 0.0:
        is_kept = ~(log_p < log_p.max() + math.log(params.min_p))
        ids, log_p = ids[is_kept], log_p[is_kept]
    return ids, log_p


def _largest(log_p: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens, at most `count`, in order; of equals the lower ids. NaN is never left out."""
    is_candidate = log_p != -torch.inf
    if count < log_p.shape[-1]:
        is_candidate &= ~(log_p < torch.topk(log_p, count).values[-1])
    ids = is_candidate.nonzero().flatten()
    log_p, order = torch.sort(log_p[ids], descending=True, stable=True)
    return ids[order][:count], log_p[:count]


def _nucleus(log_p: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fewest tokens whose probabilities sum to at least `top_p`, in order."""
    for count in (_NUCLEUS_HEAD, log_p.shape[-1]):
        ids, head = _largest(log_p, count)
        is_inside = torch.cumsum(head.exp(), dim=-1) - head.exp() < top_p
        if count >= log_p.shape[-1] or not is_inside[-1]:
            break
    num_kept = max(1, int(is_inside.sum()))
    return ids[:num_kept], head[:num_kept]


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the float64 probabilities `[vocab]` that a draw from processed `logits [vocab]` follows."""
    if params.is_greedy:
        return torch.nn.functional.one_hot(torch.argmax(logits), logits.shape[-1]).double()
    ids, log_p = kept_tokens(logits, params)
    probabilities = torch.zeros(logits.shape[-1], dtype=torch.float64, device=ids.device)
    return probabilities.index_copy_(0, ids, torch.softmax(log_p, dim=-1))


def argmax_tokens(logits: torch.Tensor) -> list[int]:
    """Return the argmax of each row of `logits [rows, vocab]`; -1 where it is NaN or minus infinity.

    The device is waited for once.
    """
    best = torch.argmax(logits, dim=-1, keepdim=True)
    is_drawable = logits.gather(-1, best) > -torch.inf
    tokens: list[int] = torch.where(is_drawable, best, -1).flatten().tolist()
    return tokens


def undrawable(logits: torch.Tensor, *, position: int) -> DLiteError:
    """Return the error that says why no token can be drawn from processed `logits [vocab]`."""
    if bool(torch.isneginf(logits).all()):
        return GrammarError(
            f"no token can follow at position {position}: the target gives every token that is allowed there a "
            "probability of 0; expected one above 0"
        )
    return CorruptModelError(
        f"the target's logits at position {position} hold NaN or infinity; expected finite numbers. "
        "Its weights are damaged or overflow in this dtype; check the model's files or load it in float32"
    )


def draw(logits: torch.Tensor, params: SamplingParams, *, position: int, bitmask: Bitmask | None = None) -> int:
    """Draw the token at `position` from the target's `logits [vocab]` under an optional grammar mask.

    Of `params` only what needs no text is used: seed, temperature, top-k, top-p, min-p. `Sampler.draw` uses all.

    Raises:
        GrammarError: The mask allows no token.
        CorruptModelError: The logits are NaN.
    """
    if bitmask is not None:
        logits = apply_bitmask(logits, bitmask)
    if params.is_greedy:
        (token,) = argmax_tokens(logits.unsqueeze(0))
    else:
        ids, log_p = kept_tokens(logits, params)
        noise = gumbel_noise(ids, seed=params.seed, position=position)
        (best,) = argmax_tokens((log_p + noise).unsqueeze(0))
        token = best if best < 0 else int(ids[best])
    if token < 0:
        raise undrawable(logits, position=position)
    return token
