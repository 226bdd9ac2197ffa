"""Encoding keeps a session's ids while its text stands, and decodes to exactly the prompt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from dlite_agent.errors import UnsupportedModelError
from dlite_agent.prompting.encoding import Detokenizer, PromptEncoder, TokenBytes

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<\uff5cé\uff5c>"]


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the weather in Paris is fine, the user said hello hello 🙂 é"] * 3, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def build_sentencepiece_tokenizer() -> Tokenizer:
    vocab = {"<unk>": 0, "▁hello": 1, "▁": 2, "a": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZER = build_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)
NUM_TOKENS = TOKENIZER.get_vocab_size(with_added_tokens=True)

pieces = st.sampled_from(
    [*SPECIAL, *TAGS, "the weather", " hello", "\n", "  ", "🙂", "é", "<|im_", "<tool_"]
) | st.text(max_size=8)
texts = st.lists(pieces, max_size=10).map("".join)
token_ids = st.integers(0, NUM_TOKENS - 1)


def respell(text: str, rng: random.Random) -> list[int]:
    """Ids of the text that encoding would not give: some tokens in single bytes."""
    ids: list[int] = []
    by_byte = {ENCODER.token_bytes[i]: i for i in range(NUM_TOKENS) if len(ENCODER.token_bytes[i]) == 1}
    for token_id in ENCODER.encode(text):
        token = ENCODER.token_bytes[token_id]
        is_added = token.decode(errors="replace") in (*SPECIAL, *TAGS)
        ids += [token_id] if is_added or rng.random() < 0.5 else [by_byte[bytes([byte])] for byte in token]
    return ids


@given(texts)
@settings(max_examples=200, deadline=None)
def test_what_is_encoded_decodes_to_the_text(text: str) -> None:
    assert ENCODER.is_segment_local
    ids = ENCODER.encode(text)
    assert ids == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert ENCODER.decode(ids) == text


@given(texts, texts, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_known_ids_stand_for_an_appended_text(before: str, after: str, seed: int) -> None:
    known = respell(before, random.Random(seed))
    assert ENCODER.decode(known) == before
    ids = ENCODER.encode(f"{before}<|im_end|>{after}", known)
    assert ids[: len(known)] == known
    assert ENCODER.decode(ids) == f"{before}<|im_end|>{after}"
    assert ids[len(known) :] == ENCODER.encode(f"<|im_end|>{after}")


@given(texts, texts, st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_whatever_the_known_ids_are_the_result_decodes_to_the_text(text: str, other: str, seed: int) -> None:
    rng = random.Random(seed)
    known = respell(text[: rng.randint(0, len(text))] + other[: rng.randint(0, 3)], rng)
    ids = ENCODER.encode(text, known)
    assert ENCODER.decode(ids) == text
    assert any(
        ids[:kept] == known[:kept] and ids[kept:] == ENCODER.encode(text[len(ENCODER.decode(known[:kept])) :])
        for kept in range(len(known) + 1)
    )


def test_an_edit_keeps_the_ids_before_its_segment_and_only_those() -> None:
    turns = ["<|im_start|>user\nhello the weather", "<|im_start|>assistant\nhello hello", "<|im_start|>user\nParis"]
    text = "<|im_end|>\n".join(turns)
    known = respell(text, random.Random(5))
    assert known != ENCODER.encode(text)
    assert ENCODER.encode(text, known) == known
    edited = text.replace("hello hello", "hello, hello")
    ids = ENCODER.encode(edited, known)
    header = TOKENIZER.token_to_id("<|im_start|>")
    kept = [index for index, token_id in enumerate(known) if token_id == header][1] + 1
    assert ids[:kept] == known[:kept]
    assert ids[kept:] == ENCODER.encode("assistant\nhello, hello<|im_end|>\n" + turns[2])


@given(st.lists(token_ids, max_size=30))
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_decoded_text_also_for_bytes_that_are_no_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(ENCODER)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    streamed = "".join(deltas) + detokenizer.flush()
    assert streamed == ENCODER.decode(ids)
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 258), max_size=30))
@settings(max_examples=200, deadline=None)
def test_decoding_agrees_with_the_tokenizer(ids: list[int]) -> None:
    assert ENCODER.decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=False)


def test_an_incomplete_character_waits_and_is_never_emitted_in_pieces() -> None:
    detokenizer = Detokenizer(ENCODER)
    ids = ENCODER.encode("é")
    by_byte = {ENCODER.token_bytes[i]: i for i in range(NUM_TOKENS) if len(ENCODER.token_bytes[i]) == 1}
    assert [detokenizer.push(by_byte[bytes([byte])]) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert "".join(detokenizer.push(token_id) for token_id in ids) == "é"


def test_ids_without_a_token_have_no_text() -> None:
    assert TokenBytes(TOKENIZER)[NUM_TOKENS + 5] == b""
    assert ENCODER.decode([NUM_TOKENS + 5]) == ""


def test_a_tokenizer_that_looks_across_special_tokens_is_found_out_and_encodes_whole_texts() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<sep>", lstrip=True, rstrip=True)])
    encoder = PromptEncoder(tokenizer)
    assert not encoder.is_segment_local
    known = tokenizer.encode("hello").ids
    assert encoder.encode("hello<sep> x", [*reversed(known)]) == tokenizer.encode("hello<sep> x").ids

    prefixing = build_sentencepiece_tokenizer()
    prefixing.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    prefixing.add_special_tokens(["<sep>"])
    assert not PromptEncoder(prefixing).is_segment_local


def test_known_ids_stand_for_the_normalized_text_of_a_normalizing_tokenizer() -> None:
    tokenizer = build_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    encoder = PromptEncoder(tokenizer)
    assert encoder.is_segment_local
    decomposed = "<|im_start|>cafe\u0301<|im_end|>"
    known = encoder.encode(decomposed)
    assert encoder.decode(known) == "<|im_start|>café<|im_end|>"
    by_byte = [token_id for char in "café" for token_id in tokenizer.encode(char).ids]
    respelled = [known[0], *by_byte, known[-1]]
    assert encoder.encode(decomposed, respelled) == respelled


def test_truncation_and_added_begin_tokens_of_the_tokenizer_do_not_matter() -> None:
    tokenizer = build_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    )
    text = "hello the weather in Paris"
    assert PromptEncoder(tokenizer).encode(text) == ENCODER.encode(text)
    assert tokenizer.truncation is not None


def test_text_of_sentencepiece_style_tokenizers_streams_exactly() -> None:
    tokenizer = build_sentencepiece_tokenizer()
    encoder = PromptEncoder(tokenizer)
    ids = [1, 3, 1, 2, *(4 + byte for byte in "🙂".encode()), 1]
    detokenizer = Detokenizer(encoder)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == encoder.decode(ids) == "helloa hello 🙂 hello"
    assert TokenBytes(tokenizer).join(ids) == " helloa hello 🙂 hello".encode()


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="fast"):
        PromptEncoder(object())
