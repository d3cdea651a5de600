"""Keeps secrets out of everything that is written: by the name of a key, and by the value of a secret environment variable.

`redact` cleans a configuration, `scrub` a text. A secret is recognised by its name (`api_key`, `HF_TOKEN`, `db-password`);
`max_new_tokens` and `tokenizer` are not secrets, so names are compared word by word, and numbers are never hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[redacted]"
_SECRET_WORDS = {"key", "apikey", "token", "authtoken", "secret", "password", "passwd", "passphrase", "credential", "credentials", "authorization", "bearer"}
_MIN_SECRET_LENGTH = 8  # shorter values would hide ordinary words
_URL_LOGIN = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name holds a secret."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z0-9]+", words))


def redact(value: Any, name: str = "") -> Any:
    """A copy of a JSON-like tree with secret values replaced; `name` is the key that `value` stands under."""
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    if name and is_secret_name(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    return scrub(str(value))


def scrub(text: str) -> str:
    """`text` without the values of this process's secret environment variables and without logins in URLs."""
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_LENGTH and is_secret_name(name) and value in text:
            text = text.replace(value, HIDDEN)
    return _URL_LOGIN.sub(rf"\1{HIDDEN}@", text)
