"""The bytes that tokens write, for each usual kind of decoder."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.core.model.tiny import character_tokenizer
from miles.data.pieces import Pieces
from tests.data.tokenizers_for_tests import byte_tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space before each text, bytes for what is not in the vocabulary."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocabulary |= {token: 257 + i for i, token in enumerate(["▁", "a", "b", "▁a", "ab"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def test_byte_level_tokens_write_parts_of_characters() -> None:
    tokenizer = byte_tokenizer(merges=(("Ġ", "a"),))
    assert Pieces(tokenizer).of(tokenizer("b aé<|im_end|>", add_special_tokens=False)["input_ids"]) == [b"b", b" a", b"\xc3", b"\xa9", b"<|im_end|>"]


def test_character_tokens() -> None:
    tokenizer = character_tokenizer("abé漢", 64)
    assert Pieces(tokenizer).of(tokenizer("a漢é\n")["input_ids"]) == [b"a", "漢".encode(), "é".encode(), b"\n"]


def test_byte_fallback_and_the_space_that_is_put_before_a_text() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer("ab aé", add_special_tokens=False)["input_ids"]
    assert b"".join(Pieces(tokenizer).of(ids)) == "ab aé".encode()
    assert Pieces(tokenizer).of(ids)[-2:] == [b"\xc3", b"\xa9"]


def test_tokens_that_the_tokenizer_would_not_choose() -> None:
    tokenizer = byte_tokenizer(merges=(("a", "b"),))
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert Pieces(tokenizer).of([a, b]) == [b"a", b"b"]


def test_an_id_without_a_token_writes_nothing() -> None:
    tokenizer = byte_tokenizer()
    assert Pieces(tokenizer).of([len(tokenizer) + 5]) == [b""]


def test_a_decoder_that_is_not_known_is_refused() -> None:
    core = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    with pytest.raises(ValueError, match="decodes by WordPiece"):
        Pieces(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"))
