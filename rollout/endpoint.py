"""Addresses of servers that a recipe names: refused before a run starts where they cannot work or would give a key away."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from miles.config import ConfigError


def check_endpoint(option: str, url: str, key_option: str, api_key_env: str | None) -> None:
    """`api_key_env`: environment variable with the bearer token, or None. A key goes over https, or to this machine.

    Raises:
        ConfigError: begins with `option`; the key itself is never quoted.
    """
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(f"{option} has a login in it, which would be written into records: use {key_option}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{option} = {url!r} is no http address, for example http://127.0.0.1:8000")
    if api_key_env is None:
        return
    if not os.environ.get(api_key_env):
        # The name is not quoted: a key that was written here by mistake would be printed.
        raise ConfigError(f"{option}: the environment variable that {key_option} names is not set: export it, or leave {key_option} out")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigError(f"{option} = {url!r} would carry the key unencrypted: use https")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
