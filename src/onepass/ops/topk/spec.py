"""The contract of topk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec
from onepass.ops._shared.specs import arguments_refused, some_mask

from . import definition
from .op import topk


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    x = make(3, 20)
    yield Sample("rows", (x, 4), {"eps": 0.5})
    yield Sample("eps tensor, mask", (make(2, 3, 9), 4), {"eps": make(3).abs() + 0.4, "mask": some_mask(x, 3, 9)})
    yield Sample("sigmoid", (make(4, 9), 3), {"kind": "sigmoid", "eps": 0.5})
    yield Sample("k above n", (make(2, 3), 5), {"pad": True})
    yield Sample("vector", (make(33), 4), {"eps": 1.0})
    yield Sample("one row", (make(1, 9), 3), {"eps": make(()).abs() + 0.4})
    yield Sample("one column", (make(3, 1), 1), {})
    yield Sample("wide", (make(2, 1500), 150), {"eps": 0.3})
    yield Sample("no rows", (make(0, 4), 2), {})


_S = torch.zeros(2, 3)

_BAD_CALLS = (
    *arguments_refused("topk", lambda s, k, mask: topk(s, k, mask=mask)),
    BadCall("k real", lambda: topk(_S, 1.5), TypeError, "topk: k must be an int, got float"),  # type: ignore[arg-type]
    BadCall("k above n", lambda: topk(_S, 4), ValueError, "k must be at most the row's length 3, got 4; pad=True"),
    BadCall("dim", lambda: topk(_S, 1, dim=2), ValueError, "topk: dim must be an int from -2 to 1, got 2"),
    BadCall("0-d", lambda: topk(_S[0, 0], 0), ValueError, "topk: k must be 1 of a 0-d tensor, got 0"),
    BadCall("eps", lambda: topk(_S, 1, eps=0.0), ValueError, "topk: eps must be > 0, got 0.0"),
    BadCall("kind", lambda: topk(_S, 1, kind="hard"), ValueError, "topk: kind must be one of .*'hard'"),
)


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    return {"topk": lambda x: topk(x, max(1, n // 7), eps=0.3)}


SPECS = [Spec("topk", topk, definition.topk, _samples, _BAD_CALLS, of_rows=_of_rows)]
