"""The contracts of score, gather and scatter_add."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from . import definition
from .op import gather, scatter_add, score


def _score_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("one token", (make(1, 1, 7), make(7)))
    yield Sample("3-d, odd width", (make(2, 5, 33), make(33)))
    yield Sample("one column", (make(2, 3, 1), make(1)))
    yield Sample("one element", (make(1, 1, 1), make(2, 1)))
    yield Sample("several vectors", (make(2, 5, 70), make(4, 70)))
    yield Sample("one of several", (make(2, 3, 8), make(1, 8)))
    yield Sample("sixteen vectors", (make(1, 3, 130), make(16, 130)))
    yield Sample("large eps", (make(2, 3, 16), make(16)), {"eps": 0.5})
    # routing vectors are N(0, 1/d), so that a wide sum is of order 1, as the tolerance assumes, not of order √d
    yield Sample("two column tiles", (make(1, 2, 5000), make(5000) * 5000**-0.5))
    yield Sample("no tokens", (make(2, 0, 4), make(4)))
    yield Sample("no batch", (make(0, 3, 4), make(2, 4)))


def _choice(batch: int, n: int, k: int, device: torch.device, routes: int = 0) -> Tensor:
    """Return k different tokens per row and route, one in four of them missing."""
    generator = torch.Generator().manual_seed(7)
    shape = (batch, routes, n) if routes else (batch, n)
    indices = torch.rand(shape, generator=generator).argsort(-1)[..., :k]
    indices[..., 3::4] = -1
    return indices.to(device)


# batch, n, k, d, routes
_CHOICES = (
    ("one token", 1, 1, 1, 7, 0),
    ("one column", 2, 5, 3, 1, 2),
    ("3-d, odd width", 2, 9, 5, 33, 0),
    ("several routes", 2, 9, 4, 20, 3),
    ("all tokens", 2, 6, 6, 16, 0),
    ("two column tiles", 1, 4, 3, 5000, 0),
    ("none", 2, 5, 0, 8, 0),
    ("no columns", 2, 5, 3, 0, 0),
    ("no batch", 0, 5, 2, 8, 0),
)


def _gather_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    for name, batch, n, k, d, routes in _CHOICES:
        x = make(batch, n, d)
        yield Sample(name, (x, _choice(batch, n, k, x.device, routes)))
    x = make(2, 0, 4)
    yield Sample("no tokens", (x, torch.full((2, 3), -1, device=x.device)))


def _scatter_samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    y = make(2 * 9, 12)
    indices = _choice(2, 9, 4, y.device)
    yield Sample("flat rows", (y, make(2, 4, 12), make(2, 4), indices))
    yield Sample("no gates", (y, make(2, 4, 12), None, indices))
    for name, batch, n, k, d, routes in _CHOICES:
        y = make(batch, n, d)
        indices = _choice(batch, n, k, y.device, routes)
        yield Sample(name, (y, make(*indices.shape, d), make(*indices.shape), indices))


_X, _I = torch.ones(2, 5, 3), torch.zeros(2, 1, dtype=torch.int64)
_U, _G = torch.ones(2, 1, 3), torch.ones(2, 1)

_BAD_SCORE = (
    BadCall("2-d x", lambda: score(torch.ones(2, 3), torch.ones(3)), ValueError, r"x must be \(batch, n, dim\)"),
    BadCall("width", lambda: score(_X, torch.ones(4)), ValueError, r"weight must be .*D = 3.*\(4,\)"),
    BadCall("17 vectors", lambda: score(_X, torch.ones(17, 3)), ValueError, "R = 17"),
    BadCall("no columns", lambda: score(torch.ones(2, 3, 0), torch.ones(0)), ValueError, "dim ≥ 1"),
    BadCall("eps", lambda: score(_X, torch.ones(3), eps=-1.0), ValueError, "eps must be ≥ 0, got -1.0"),
    BadCall("integer x", lambda: score(torch.ones(2, 3, 4, dtype=torch.int64), torch.ones(4)), TypeError, "int64"),
)
_BAD_GATHER = (
    BadCall("2-d x", lambda: gather(torch.ones(2, 3), _I), ValueError, r"x must be \(batch, n, dim\)"),
    BadCall("int32", lambda: gather(_X, _I.int()), TypeError, "indices must be int64, got torch.int32"),
    BadCall("1-d indices", lambda: gather(_X, _I[0]), ValueError, r"indices must be .*got \(1,\)"),
    BadCall("batch", lambda: gather(_X, _I[:1]), ValueError, "must have the batch 2"),
)
_BAD_SCATTER = (
    BadCall("y", lambda: scatter_add(torch.ones(3, 5, 3), _U, _G, _I), ValueError, "y must be .*batch = 2"),
    BadCall("rows", lambda: scatter_add(torch.ones(5, 3), _U, _G, _I), ValueError, "y must be .*batch = 2"),
    BadCall("update", lambda: scatter_add(_X, torch.ones(2, 2, 3), _G, _I), ValueError, r"update must be \(2, 1, 3\)"),
    BadCall("gates", lambda: scatter_add(_X, _U, torch.ones(2), _I), ValueError, r"gates must .*\(2, 1\), got \(2,\)"),
    BadCall("int32", lambda: scatter_add(_X, _U, _G, _I.int()), TypeError, "indices must be int64"),
    BadCall("bool gates", lambda: scatter_add(_X, _U, _G.bool(), _I), TypeError, "gates must be float32.*bool"),
)


def _score_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    one, three = make(n), make(3, n)
    return {
        "score": lambda x: score(x[None], one)[0],
        "score, three": lambda x: score(x[None], three)[0].mT,
    }


SPECS = [
    Spec("score", score, definition.score, _score_samples, _BAD_SCORE, of_rows=_score_rows),
    Spec("gather", gather, definition.gather, _gather_samples, _BAD_GATHER),
    Spec("scatter_add", scatter_add, definition.scatter_add, _scatter_samples, _BAD_SCATTER),
]
