"""transformers' own `generate`, measured as it comes: stock products, sdpa attention, its own cache.

Our target replaces parts of its model, so a peer loads the weights a second time.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlite_agent.bench.contest import Contender, Run

LOOKUP_TOKENS = (3, 10)
"""Draft lengths of the prompt-lookup mode: 10 is its default, 3 is what stock products like better on a CPU."""


def load_stock(folder: Path, *, dtype: torch.dtype) -> Any:
    """Load a causal language model as transformers users do, with nothing of its generation defaults."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


class _Stopwatch:
    """A streamer that notes when tokens come; the prompt, which comes first, is none of them."""

    def __init__(self) -> None:
        self.passes: list[tuple[float, list[int]]] = []
        self._has_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self._has_prompt:
            self.passes.append((time.perf_counter(), tokens.flatten().tolist()))
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to flush."""


class PeerSide:
    """A stock model and its cache of one prompt."""

    def __init__(self, model: Any, *, end_ids: frozenset[int]) -> None:
        self.model = model
        self.end_ids = sorted(end_ids)
        self._rows: Any = None
        model.prepare_inputs_for_generation = _behind_the_rows(model.prepare_inputs_for_generation)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> float:
        """Compute the rows in one pass, as `generate` does."""
        from transformers import DynamicCache

        start = time.perf_counter()
        self._rows = DynamicCache(config=self.model.config)
        if len(ids) > 1:
            self.model(input_ids=torch.tensor([ids[:-1]]), cache=self._rows, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    @torch.inference_mode()
    def run(self, ids: Sequence[int], max_tokens: int, **mode: Any) -> Run:
        """Generate greedily behind a prompt whose rows are there, in one of `generate`'s modes."""
        stopwatch = _Stopwatch()
        rows = copy.deepcopy(self._rows)
        prompt = torch.tensor([ids])
        end = {"eos_token_id": self.end_ids, "pad_token_id": self.end_ids[0]} if self.end_ids else {}
        start = time.perf_counter()
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=rows,
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            streamer=stopwatch,
            **end,
            **mode,
        )
        return Run.of(start, stopwatch.passes)


def _behind_the_rows(prepare: Any) -> Any:
    """Make the assisted modes use rows that are there already; the plain mode does so by itself."""

    @functools.wraps(prepare)
    def prepared(input_ids: Any, next_sequence_length: int | None = None, cache: Any = None, **kwargs: Any) -> Any:
        if next_sequence_length is None and cache is not None:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return prepare(input_ids, next_sequence_length=next_sequence_length, cache=cache, **kwargs)

    return prepared


def lookup_names() -> list[str]:
    """Return the names of the prompt-lookup contenders."""
    return [f"transformers lookup {count}" for count in LOOKUP_TOKENS]


PLAIN = "transformers plain"
ASSISTED = "transformers assisted"


def peer_contenders(side: PeerSide, *, assistant: Any = None) -> list[Contender]:
    """Return `generate` plain, with prompt lookup, and with an assistant model if there is one."""
    contenders = [Contender(PLAIN, side, side.run)]
    for name, count in zip(lookup_names(), LOOKUP_TOKENS, strict=True):
        contenders.append(Contender(name, side, functools.partial(side.run, prompt_lookup_num_tokens=count)))
    if assistant is not None:
        contenders.append(Contender(ASSISTED, side, functools.partial(side.run, assistant_model=assistant)))
    return contenders
