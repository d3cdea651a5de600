"""Meters against what can be counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from miles.core.planning.meters import Meter


def test_flops_of_a_linear_layer_forward_and_backward() -> None:
    layer = nn.Linear(6, 5, bias=False)
    with Meter(layer) as meter:
        layer(torch.ones(7, 6, requires_grad=True)).sum().backward()
    assert meter.flops == {"matmul": 3 * 2 * 7 * 6 * 5, "attention": 0}


def test_flops_of_attention_are_two_products_forward_and_five_backward() -> None:
    query, key, value = (torch.randn(3, 4, n, 16, requires_grad=True) for n in (10, 12, 12))
    with Meter(nn.Identity()) as meter:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    assert meter.flops == {"matmul": 0, "attention": 7 * 2 * 3 * 4 * 10 * 12 * 16}


def test_a_storage_is_held_once_and_let_go_with_its_graph() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Meter(nn.Identity()) as meter:
        y = x * 2
        z = (y * y).sum() + (y[:10] * y[10:20]).sum()
        assert meter.saved_bytes == 4000  # y, however often; the 2 is a number
        z.backward()
        del y, z
    assert (meter.saved_bytes, meter.peak_saved_bytes) == (0, 4000)


def test_parameters_are_not_counted() -> None:
    layer = nn.Linear(100, 100, bias=False)
    with Meter(layer) as meter:
        layer(torch.ones(2, 100)).sum()
    assert meter.peak_saved_bytes == 2 * 100 * 4


def test_host_syncs() -> None:
    x = torch.arange(4)
    with Meter(nn.Identity()) as meter:
        float(x.sum())
        x.nonzero()
        _ = x + 1
    assert meter.host_syncs == 2
