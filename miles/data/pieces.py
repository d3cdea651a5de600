"""The bytes that each token writes: where the tokens of a text begin and end, whatever tokenisation a model chose for it.

Ids that were sampled need not be those that the tokenizer would give, and one token may hold a part of a character, so neither offsets of
a new tokenisation nor decoded strings can tell. A tokenizer's own decoder says what a token writes; the usual kinds of it are known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "A quick test, of 1,234 things:\n\n\tcafé  naïve — 漢字 😀 end "
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """Bytes by token id.

    Raises:
        ValueError: the tokenizer is not a fast one, or its decoder is of a kind that is not known here.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        steps = _steps(tokenizer)
        kinds = [step["type"] for step in steps]
        if unknown := set(kinds) - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} decodes by {', '.join(sorted(unknown))}: the bytes of its tokens are not known")
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._replaced = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
        # SentencePiece puts a space before a text, and its decoder takes it off again.
        self._strips = "Metaspace" in kinds or any(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0 for step in steps)
        self._check()

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """What each of `ids` writes, as a text of its own; an id without a token writes nothing."""
        pieces = [b"" if token is None else self._bytes(token) for token in self._tokenizer.convert_ids_to_tokens(list(ids))]
        if self._strips and pieces and pieces[0].startswith(b" "):
            pieces[0] = pieces[0][1:]
        return pieces

    def _bytes(self, token: str) -> bytes:
        if self._byte_fallback and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._byte_level:
            found = [_BYTE_OF.get(character) for character in token]
            # An added token stands as it is.
            return token.encode() if None in found else bytes(found)  # type: ignore[arg-type]
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()

    def _check(self) -> None:
        ids = self._tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if b"".join(self.of(ids)) != text.encode():
            raise ValueError(f"tokenizer {self._tokenizer.name_or_path!r} writes {text!r}, but the bytes of its tokens are {b''.join(self.of(ids))!r}")


def _steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} is not a fast one (tokenizer.json): the bytes of its tokens are not known")
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no decoder: the bytes of its tokens are not known")
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    return (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"]["String"], step["content"])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
