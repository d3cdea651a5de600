"""Ranks meet without racing for a port."""

from __future__ import annotations

import socket

from trainer.rendezvous import interface_of, open_store


def test_the_store_holds_a_port_of_its_own_from_the_start() -> None:
    first, here = open_store("127.0.0.1", 1, 30.0)
    second, there = open_store("127.0.0.1", 1, 30.0)
    assert here.port != there.port
    with socket.create_connection((here.address, here.port), timeout=5):
        pass
    del first, second


def test_the_interface_is_the_one_with_the_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
