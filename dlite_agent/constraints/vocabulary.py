"""The tokens of a target as bytes, as masks, and as llguidance knows them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np

from dlite_agent.bitmask import Bitmask
from dlite_agent.errors import GrammarError, MissingDependencyError
from dlite_agent.prompting.dialects import DIALECTS, GENERIC
from dlite_agent.prompting.encoding import TokenBytes, backend_tokenizer


class Vocabulary:
    """The tokens of one tokenizer. Markers of calls are text; other special tokens never are.

    Args:
        tokenizer: A transformers fast tokenizer or a `tokenizers.Tokenizer`.
        vocab_size: Length of the target's logits; it may be larger than the tokenizer's vocabulary.
        eos_ids: Ids of the tokens that end a reply.

    Raises:
        MissingDependencyError: llguidance is not installed.
        GrammarError: There are no end tokens.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise MissingDependencyError("grammars need llguidance: pip install llguidance") from error
        if not eos_ids:
            raise GrammarError("there are no end tokens; a grammar needs at least one to end a reply with")
        self._tokenizer = backend_tokenizer(tokenizer)
        self.vocab_size = vocab_size
        self.num_tokens = max(vocab_size, self._tokenizer.get_vocab_size(with_added_tokens=True), max(eos_ids) + 1)
        self.eos_ids = frozenset(eos_ids)
        table = TokenBytes(self._tokenizer)
        self.tokens = [table[token_id] for token_id in range(self.num_tokens)]
        self._control_ids = self._find_control_ids()
        # What TokenizerWrapper asks of the object it wraps:
        self.eos_token_id, self.bos_token_id = min(eos_ids), None
        self.special_token_ids = sorted(self._control_ids)
        self.ll_tokenizer = LLTokenizer(
            TokenizerWrapper(self), n_vocab=self.num_tokens, eos_token=sorted(eos_ids), slices=LLTokenizer.json_slices()
        )
        self.eos_mask = self.mask_of_ids(eos_ids)
        self.every_mask = self.mask_of_ids(range(vocab_size))

    def __call__(self, text: str) -> list[int]:
        """The canonical ids of a text in which nothing is a control token; llguidance calls this."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        return [i for char in text for i in self._tokenizer.encode(char, add_special_tokens=False).ids]

    def mask_of_ids(self, ids: Collection[int]) -> Bitmask:
        """A mask of just these ids."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[[token_id for token_id in ids if token_id < self.vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask_of_matcher(self, matcher: Any) -> Bitmask:
        """The tokens that may follow where the matcher stands.

        Raises:
            GrammarError: None may, or the grammar got too complex.
        """
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        mask = bits[: -(-self.vocab_size // 32)] & self._known_mask
        if matcher.is_error() or not mask.any():
            raise GrammarError(f"the grammar is stuck: {matcher.get_error() or 'no token can follow'}")
        return mask

    def starting_with(self, prefix: bytes) -> list[int]:
        """Text tokens that start with the prefix."""
        first = bisect_left(self._sorted, (prefix, 0))
        last = bisect_left(self._sorted, (prefix + b"\xff" * 4, 0))
        return [token_id for token, token_id in self._sorted[first:last] if token.startswith(prefix)]

    def containing(self, part: bytes) -> list[int]:
        """Text tokens that contain the part."""
        return [token_id for token, token_id in self._with_byte(part[-1]) if part in token]

    def _with_byte(self, byte: int) -> list[tuple[bytes, int]]:
        if byte not in self._by_byte:
            self._by_byte[byte] = [entry for entry in self._sorted if byte in entry[0]]
        return self._by_byte[byte]

    @cached_property
    def _by_byte(self) -> dict[int, list[tuple[bytes, int]]]:
        return {}

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((token, i) for i, token in enumerate(self.tokens) if token and i not in self._control_ids)

    @cached_property
    def _known_mask(self) -> Bitmask:
        return self.mask_of_ids([i for i, token in enumerate(self.tokens) if token or i in self.eos_ids])

    def _find_control_ids(self) -> frozenset[int]:
        tags = {tag for dialect in (*DIALECTS, GENERIC) for tag in dialect.markers}
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        control = {
            token_id
            for token_id, token in added.items()
            if token.content not in tags and (token.special or token.content.startswith("<|"))
        }
        return frozenset(control | self.eos_ids)
