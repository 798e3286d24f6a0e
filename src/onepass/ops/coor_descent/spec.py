"""The contract of coor_descent."""

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
from .op import coor_descent

_SCHEDULE = {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7}


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    x = make(4, 33)
    yield Sample("rows", (x,), {"n_iters": 50, "k": 5.3, "eps": 0.5})
    yield Sample("one step", (make(2, 3, 17),), {"n_iters": 1, "k": 2.5})
    yield Sample("schedule, k tensor", (make(3, 40),), {**_SCHEDULE, "k": make(3).abs() + 1.5, "eps": 0.3})
    yield Sample("schedule that does not end", (make(3, 40),), {**_SCHEDULE, "n_iters": 7, "k": 4.2})
    yield Sample("mask, 0-d k", (make(3, 40),), {"n_iters": 9, "k": make(()).abs() + 2.2, "mask": some_mask(x, 3, 40)})
    yield Sample("k above n", (make(3, 5),), {"n_iters": 5, "k": 7.0})
    yield Sample("vector", (make(33),), {"n_iters": 12, "k": 4.5, "eps": 1.0})
    yield Sample("one row", (make(1, 9),), {"n_iters": 6, "k": make(1).abs() + 2.2, "eps": 0.5})
    yield Sample("one column", (make(3, 1),), {"n_iters": 4, "k": 0.5})
    yield Sample("wide", (make(2, 1500),), {"n_iters": 10, "k": 100.5, "eps": 0.5})
    yield Sample("no columns", (make(4, 0),), {"n_iters": 3, "k": 2.0})
    yield Sample("no rows", (make(0, 4),), {"n_iters": 3, "k": 2.0})


_S: Any = torch.zeros(2, 3)

_BAD_CALLS = (
    *arguments_refused("coor_descent", lambda s, k, mask: coor_descent(s, n_iters=3, k=k, mask=mask)),
    BadCall("0-d", lambda: coor_descent(_S[0, 0], n_iters=1, k=1), ValueError, "at least one dimension, got a 0-d"),
    BadCall("no steps", lambda: coor_descent(_S, n_iters=0, k=1), ValueError, "n_iters must be ≥ 1, got 0"),
    BadCall("half a step", lambda: coor_descent(_S, n_iters=1.5, k=1), TypeError, "n_iters must be an int, got float"),  # type: ignore[arg-type]
    BadCall("k zero", lambda: coor_descent(_S, n_iters=1, k=0), ValueError, "k must be > 0, got 0"),
    BadCall("eps", lambda: coor_descent(_S, n_iters=1, k=1, eps=0.0), ValueError, "eps must be > 0"),
    BadCall("eps tensor", lambda: coor_descent(_S, n_iters=1, k=1, eps=_S), TypeError, "eps must be a number.*Tensor"),
    BadCall("eps inf", lambda: coor_descent(_S, n_iters=1, k=1, eps=math.inf), ValueError, r"eps must be ≤ 3.4e\+38"),
    BadCall("eps_decay", lambda: coor_descent(_S, n_iters=1, k=1, eps_decay=0), ValueError, "eps_decay must be > 0"),
)


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    k, schedule = max(1, n // 7), dict[str, Any](_SCHEDULE)
    return {
        "coor_descent": lambda x: coor_descent(x, n_iters=20, k=k, eps=0.1),
        "coor_descent, schedule": functools.partial(coor_descent, k=k, **schedule),
    }


SPECS = [Spec("coor_descent", coor_descent, definition, _samples, _BAD_CALLS, of_rows=_of_rows)]
