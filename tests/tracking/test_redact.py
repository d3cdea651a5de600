"""Secrets are hidden by the name of their key and by their value; ordinary options are not."""

from __future__ import annotations

import pytest

from miles.tracking.redact import HIDDEN, is_secret_name, redact, scrub


@pytest.mark.parametrize("name", ["api_key", "apikey", "WANDB_API_KEY", "HF_TOKEN", "apiKey", "db-password", "client_secret", "Authorization", "credentials"])
def test_secret_names_are_recognised(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_new_tokens", "tokenizer", "max_tokens_per_microbatch", "keep", "monkey", "prompt_column", "stop"])
def test_option_names_are_not_secrets(name):
    assert not is_secret_name(name)


def test_a_secret_deep_in_a_configuration_is_hidden_and_its_neighbours_stay():
    config = {"rollout": {"max_new_tokens": 8, "sglang_args": {"api_key": "hunter2", "port": 1}}, "list": [{"token": "abc"}]}
    clean = {"rollout": {"max_new_tokens": 8, "sglang_args": {"api_key": HIDDEN, "port": 1}}, "list": [{"token": HIDDEN}]}
    assert redact(config) == clean


def test_a_list_of_secrets_is_hidden():
    assert redact({"token": ["one", "two"]}) == {"token": HIDDEN}


def test_the_value_of_a_secret_variable_is_hidden_in_any_text(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert scrub("login with 0123456789abcdef failed") == f"login with {HIDDEN} failed"


def test_the_value_of_a_secret_variable_is_hidden_under_a_harmless_key(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "0123456789abcdef")
    assert redact({"args": {"header": "x 0123456789abcdef"}}) == {"args": {"header": f"x {HIDDEN}"}}


def test_a_login_in_a_url_is_hidden():
    assert scrub("at https://me:hunter2@host/x") == f"at https://{HIDDEN}@host/x"
