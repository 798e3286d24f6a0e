"""The contract of soft_topk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec
from onepass.ops._shared.specs import arguments_refused, some_mask

from .definition import definition
from .op import KINDS, soft_topk


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    for kind in KINDS:
        yield Sample(f"rows, {kind}", (make(4, 33), 5.3), {"kind": kind, "eps": 0.5})
        yield Sample(f"k and eps tensors, {kind}", (make(2, 3, 40), make(3).abs() + 1.3),
                     {"eps": make(2, 1).abs() + 0.4, "kind": kind})  # fmt: skip
    x = make(3, 40)
    yield Sample("mask, 0-d k", (x, make(()).abs() + 2.2), {"mask": some_mask(x, 3, 40), "eps": 0.3})
    yield Sample("mask of columns", (make(2, 2, 19), 3.4), {"mask": some_mask(x, 19), "kind": "sigmoid"})
    k = torch.tensor([2.5, 12.0, 8.6, 9.0], device=x.device).to(x.dtype)
    yield Sample("k above some counts", (make(4, 9), k), {"eps": make(4).abs() + 0.2})
    yield Sample("vector", (make(33), 4.7), {"eps": 1.0})
    yield Sample("one row", (make(1, 9), make(1).abs() + 2.2), {"eps": make(()).abs() + 0.4})
    yield Sample("one column", (make(3, 1), 0.4), {})
    yield Sample("wide", (make(2, 1500), 150.5), {"eps": 0.3})
    yield Sample("no columns", (make(4, 0), 2.0), {})
    yield Sample("no rows", (make(0, 4), 2.0), {})


_S = torch.zeros(2, 3)

_BAD_CALLS = (
    *arguments_refused("soft_topk", lambda s, k, mask: soft_topk(s, k, mask=mask)),
    BadCall("k zero", lambda: soft_topk(_S, 0), ValueError, "k must be > 0, got 0"),
    BadCall("k nan", lambda: soft_topk(_S, math.nan), ValueError, "k must be > 0, got nan"),
    BadCall("k tensor", lambda: soft_topk(_S, _S[:, 0]), ValueError, "k must be > 0 everywhere, got a minimum of 0"),
    BadCall("k shape", lambda: soft_topk(_S, _S[0]), ValueError, r"k must be a number or broadcast.*\(2,\).*\(3,\)"),
    BadCall("k bool", lambda: soft_topk(_S, torch.ones(2) > 0), TypeError, "k must be a number or a real tensor"),
    BadCall("eps zero", lambda: soft_topk(_S, 1, eps=0.0), ValueError, "eps must be > 0, got 0.0"),
    BadCall("eps tensor", lambda: soft_topk(_S, 1, eps=_S[:, 0] - 1), ValueError, "eps must be > 0 everywhere"),
    BadCall("dim", lambda: soft_topk(_S, 1, dim=2), ValueError, "soft_topk: dim must be an int from -2 to 1, got 2"),
    BadCall("kind", lambda: soft_topk(_S, 1, kind="soft"), ValueError, "kind must be one of capped_exp, .*'soft'"),
)


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    k = max(1, n // 7)
    return {
        **{f"soft_topk, {kind}": functools.partial(soft_topk, k=k, eps=0.3, kind=kind) for kind in KINDS},
        "soft_topk, small eps": lambda x: soft_topk(x, k, eps=0.01),
        "soft_topk, mask": lambda x: soft_topk(x, k, eps=0.3, mask=x.abs() < 2),
    }


SPECS = [Spec("soft_topk", soft_topk, definition, _samples, _BAD_CALLS, of_rows=_of_rows)]
