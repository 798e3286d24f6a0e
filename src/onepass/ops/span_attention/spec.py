"""The contracts of span_attention, rotary and rotary_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from . import definition
from .op import rotary, rotary_attention, span_attention


def _qkv(make: Callable[..., Tensor], batch: int, n: int, m: int, heads: int, width: int) -> tuple[Tensor, ...]:
    return make(batch, n, heads, width), make(batch, m, heads, width), make(batch, m, heads, width)


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    device = make(1).device
    i = torch.arange(40, device=device)
    window = i // 8 * 8
    yield Sample("window", (*_qkv(make, 2, 40, 40, 2, 16), window - 8, window + 16))
    yield Sample("causal window", (*_qkv(make, 1, 40, 40, 1, 16), window - 8, i + 1))
    some = torch.arange(40, device=device) % 3 != 0
    mask = torch.stack((some, some & (i > 20)))
    yield Sample("mask", (*_qkv(make, 2, 40, 40, 1, 16), window - 8, window + 16), {"mask": mask})
    ends = torch.stack((i // 10 * 3, torch.full_like(i, 7)))
    yield Sample("prefix per row", (*_qkv(make, 2, 40, 13, 2, 8), torch.zeros_like(ends), ends))
    yield Sample("odd width", (*_qkv(make, 1, 5, 9, 2, 5), torch.zeros_like(i[:5]), i[:5] + 5))
    many = torch.arange(150, device=device)
    yield Sample("two tiles", (*_qkv(make, 1, 150, 200, 1, 16), many, many + 45))
    yield Sample("one query, one key", (*_qkv(make, 1, 1, 1, 1, 1), i[:1], i[:1] + 1))
    yield Sample("one query", (*_qkv(make, 1, 1, 5, 1, 4), i[:1], i[:1] + 4))
    yield Sample("one column", (*_qkv(make, 2, 3, 4, 2, 1), i[:3], i[:3] + 2))
    yield Sample("no key seen", (*_qkv(make, 1, 4, 3, 1, 8), i[:4], i[:4]))
    yield Sample("no keys", (*_qkv(make, 2, 4, 0, 1, 8), i[:4], i[:4] + 1))
    yield Sample("no queries", (*_qkv(make, 2, 0, 4, 1, 8), i[:0], i[:0]))


def _call(q: Any = None, k: Any = None, first: Any = None, last: Any = None, **options: Any) -> Callable[[], Tensor]:
    q = torch.ones(2, 3, 1, 4) if q is None else q
    k = torch.ones(2, 5, 1, 4) if k is None else k
    i = torch.arange(3)
    return lambda: span_attention(q, k, k, i if first is None else first, i if last is None else last, **options)


_BAD = (
    BadCall("3-d q", _call(q=torch.ones(2, 3, 4)), ValueError, r"q must be \(batch, length, heads, width\)"),
    BadCall("integer q", _call(q=torch.ones(2, 3, 1, 4).long()), TypeError, "int64"),
    BadCall("mixed dtypes", _call(k=torch.ones(2, 5, 1, 4).double()), TypeError, "one dtype"),
    BadCall("other width", _call(k=torch.ones(2, 5, 1, 6)), ValueError, "q's batch, heads and width"),
    BadCall("float span", _call(first=torch.ones(3)), TypeError, "first must be int32 or int64"),
    BadCall("short span", _call(last=torch.arange(2)), ValueError, r"last must be \(n,\)"),
    BadCall("float mask", _call(mask=torch.ones(2, 5)), TypeError, "mask must be bool"),
    BadCall("mask elsewhere", _call(mask=torch.ones(2, 5, device="meta").bool()), ValueError, "mask is on meta but q"),
    BadCall("mask of queries", _call(mask=torch.ones(2, 3).bool()), ValueError, "mask must be"),
)


def _rotary_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    positions = torch.tensor([[0, 7, 100_000], [3, 2, 1]], device=make(1).device)
    yield Sample("in order", (make(2, 5, 3, 8),))
    yield Sample("positions", (make(2, 3, 2, 16), positions))
    yield Sample("shared positions", (make(2, 3, 1, 6), positions[0]))
    yield Sample("one pair", (make(2, 3, 2, 2), positions))
    yield Sample("one token", (make(1, 1, 1, 6), positions[:1, 1:2]))
    yield Sample("no tokens", (make(2, 0, 3, 8),))


_ROTARY_BAD = (
    BadCall("3-d x", lambda: rotary(torch.ones(2, 3, 4)), ValueError, r"x must be \(batch, n, heads, width\)"),
    BadCall("odd width", lambda: rotary(torch.ones(2, 3, 1, 5)), ValueError, "must be even, got 5"),
    BadCall("integer x", lambda: rotary(torch.ones(2, 3, 1, 4).int()), TypeError, "int32"),
    BadCall("positions", lambda: rotary(torch.ones(2, 3, 1, 4), torch.arange(4)), ValueError, "positions must be"),
    BadCall("floats", lambda: rotary(torch.ones(2, 3, 1, 4), torch.ones(3)), TypeError, "positions must be int64"),
)


def _packed_reference(qkv: Tensor, first: Tensor, last: Tensor, *, mask: Tensor | None = None) -> Tensor:
    q, k, v = qkv.unbind(2)
    return definition.reference(definition.rotate(q), definition.rotate(k), v, first, last, mask=mask)


def _packed_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    i = torch.arange(40, device=make(1).device)
    window = i // 8 * 8
    yield Sample("window", (make(2, 40, 3, 2, 16), window - 8, window + 16))
    yield Sample("mask", (make(1, 40, 3, 1, 8), window - 8, i + 1), {"mask": (i % 3 != 0)[None]})
    yield Sample("one token, one head, one pair", (make(1, 1, 3, 1, 2), i[:1], i[:1] + 1))
    yield Sample("one pair", (make(2, 5, 3, 2, 2), i[:5] - 2, i[:5] + 1))
    yield Sample("no tokens", (make(2, 0, 3, 1, 8), i[:0], i[:0]))


def _packed(*shape: int, queries: int = 3, device: str = "cpu") -> Callable[[], Tensor]:
    return lambda: rotary_attention(torch.ones(shape, device=device), torch.arange(queries), torch.arange(3))


_PACKED_BAD = (
    BadCall("not packed", _packed(2, 3, 1, 4), ValueError, r"qkv must be \(batch, n, 3, heads, width\)"),
    BadCall("odd", _packed(2, 3, 3, 1, 5), ValueError, "width even"),
    BadCall("short span", _packed(2, 3, 3, 1, 4, queries=2), ValueError, "rotary_attention: first must be"),
    BadCall("device", _packed(2, 3, 3, 1, 4, device="meta"), ValueError, "first is on cpu but qkv is on meta"),
)

SPECS = [
    Spec("rotary_attention", rotary_attention, _packed_reference, _packed_samples, _PACKED_BAD),
    Spec("rotary", rotary, definition.rotate, _rotary_samples, _ROTARY_BAD),
    Spec("span_attention", span_attention, definition.reference, _samples, _BAD),
]
