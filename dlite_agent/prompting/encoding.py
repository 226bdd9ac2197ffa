"""Text to token ids and back, exactly, and without changing the ids a session already has.

Tokenizers are not injective: a model may have generated ids that encoding its text would not give. The ids that are
stored with a session stay the truth for as long as the text stays the same, segment by segment between the special
tokens; from the first change on the text is encoded afresh.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders

from dlite_agent.errors import UnsupportedModelError

_PROBES = ("probe", " a probe\n", "\n\nprobe", "  é🙂", "")
_MAX_PROBED_TOKENS = 8
_REPLACEMENT = "\ufffd"


def backend_tokenizer(tokenizer: Any) -> Tokenizer:
    """The `tokenizers.Tokenizer` of a transformers fast tokenizer, or the argument itself if it is one.

    Raises:
        UnsupportedModelError: It is neither.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModelError(
            f"got a tokenizer of type {type(tokenizer).__name__}; expected a fast one (with a tokenizer.json)"
        )
    return backend


class TokenBytes:
    """The bytes that each token stands for; added tokens stand for their text.

    Args:
        tokenizer: A transformers fast tokenizer or a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = backend_tokenizer(tokenizer)
        self._added: dict[int, str] = {i: token.content for i, token in _added_tokens(self._tokenizer).items()}
        self.is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not have."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def join(self, ids: Sequence[int]) -> bytes:
        """The bytes of a run of tokens."""
        return b"".join([self[token_id] for token_id in ids])

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return _sentencepiece_bytes(token)
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()


class PromptEncoder:
    """Encodes prompts around the ids a session already has, and decodes ids without any clean-up.

    Args:
        tokenizer: A transformers fast tokenizer or a `tokenizers.Tokenizer`.

    Attributes:
        is_segment_local: Whether text between added tokens encodes on its own as it does inside a whole prompt. It
            is probed; where it does not hold, known ids are not used and the whole text is always encoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = backend_tokenizer(tokenizer)
        if backend.truncation is not None or backend.padding is not None:
            backend = copy.copy(backend)
            backend.no_truncation()
            backend.no_padding()
        self._tokenizer = backend
        self.token_bytes = TokenBytes(backend)
        added = _added_tokens(backend)
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._added_ids = frozenset(added)
        longest_first = sorted(self._added, key=len, reverse=True)
        self._boundary = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        is_plain = not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        self.is_segment_local = is_plain and self._probe_locality()

    def encode(self, text: str, known_ids: Sequence[int] = ()) -> list[int]:
        """Encode a prompt, keeping the known ids for as long as their text is the prompt's.

        Args:
            text: The rendered prompt; special tokens in it are recognised.
            known_ids: Stored ids of the session: earlier prompts and generated tokens.

        Returns:
            Ids that decode to `text` (to its normalized form, if the tokenizer normalizes). The known ids are used up
            to the last added token before the first difference.
        """
        if not known_ids or not self.is_segment_local:
            return self._encode_fresh(text)
        kept, position = self._match_known(text, known_ids)
        return list(known_ids[:kept]) + self._encode_fresh(text[position:])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids: nothing cleaned up, nothing skipped, invalid UTF-8 as U+FFFD."""
        if self.token_bytes.is_byte_level:
            return self.token_bytes.join(ids).decode("utf-8", errors="replace")
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _encode_fresh(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def _match_known(self, text: str, known_ids: Sequence[int]) -> tuple[int, int]:
        """How many of the known ids stand, and the position in the text up to which they reach."""
        kept = position = 0
        while True:
            boundary = self._boundary.search(text, position)
            text_end = boundary.start() if boundary else len(text)
            ids_end = self._next_added(known_ids, kept)
            if not self._is_text_of(text[position:text_end], known_ids[kept:ids_end]):
                return kept, position
            kept, position = ids_end, text_end
            if boundary is None or ids_end == len(known_ids) or self._added[boundary.group()] != known_ids[ids_end]:
                return kept, position
            kept, position = ids_end + 1, boundary.end()

    def _next_added(self, ids: Sequence[int], start: int) -> int:
        return next((index for index in range(start, len(ids)) if ids[index] in self._added_ids), len(ids))

    def _is_text_of(self, text: str, ids: Sequence[int]) -> bool:
        decoded = self.decode(ids)
        normalizer = self._tokenizer.normalizer
        return decoded == text or (normalizer is not None and decoded == normalizer.normalize_str(text))

    def _probe_locality(self) -> bool:
        for content, token_id in list(self._added.items())[:_MAX_PROBED_TOKENS]:
            for before in _PROBES:
                for after in _PROBES:
                    parts = [*self._encode_fresh(before), token_id, *self._encode_fresh(after)]
                    if self._encode_fresh(before + content + after) != parts:
                        return False
        return True


class Detokenizer:
    """Turns a stream of ids into a stream of text; an incomplete character waits for the rest of its bytes.

    For byte-level tokenizers the deltas and the final `flush` together are exactly `PromptEncoder.decode` of all ids;
    for others they are too, unless the ids spell bytes that are no text.

    Args:
        encoder: The encoder whose `decode` is followed.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._emitted_ids: list[int] = []
        self._waiting_ids: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that the token completes, possibly empty."""
        if self._encoder.token_bytes.is_byte_level:
            return self._utf8.decode(self._encoder.token_bytes[token_id])
        self._waiting_ids.append(token_id)
        delta = self._waiting_text()
        return "" if delta.endswith(_REPLACEMENT) else self._emit(delta)

    def flush(self) -> str:
        """The text of what was still incomplete; the detokenizer then starts afresh."""
        if self._encoder.token_bytes.is_byte_level:
            return self._utf8.decode(b"", final=True)
        delta = self._emit(self._waiting_text())
        self._emitted_ids, self._waiting_ids = [], []
        return delta

    def _waiting_text(self) -> str:
        """What the waiting ids add; some ids before them are decoded along, for decoders that strip the first space."""
        before = self._encoder.decode(self._emitted_ids)
        return self._encoder.decode(self._emitted_ids + self._waiting_ids)[len(before) :]

    def _emit(self, delta: str) -> str:
        if delta:
            self._emitted_ids, self._waiting_ids = self._waiting_ids, []
        return delta


def _added_tokens(tokenizer: Tokenizer) -> dict[int, Any]:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    return added


def _sentencepiece_bytes(token: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace("▁", " ").encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
