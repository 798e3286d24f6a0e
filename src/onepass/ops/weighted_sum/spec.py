"""Samples and bad calls of `weighted_sum`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from .definition import definition
from .op import weighted_sum


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("vector", (make(33), make(33)))
    yield Sample("one row", (make(1, 10), make(10)))
    yield Sample("one column", (make(3, 1), make(1)))
    yield Sample("one element", (make(1, 1), make(1)))
    yield Sample("rows", (make(6, 10), make(10)))
    yield Sample("3-d, odd width", (make(2, 3, 33), make(33)))
    yield Sample("several vectors", (make(5, 70), make(4, 70)))
    yield Sample("one of several", (make(5, 7), make(1, 7)))
    yield Sample("sixteen vectors", (make(3, 130), make(16, 130)))
    yield Sample("two column tiles", (make(3, 5000), make(5000)))
    yield Sample("no columns", (make(4, 0), make(0)))
    yield Sample("no rows", (make(0, 4), make(4)))
    yield Sample("no rows, vectors", (make(0, 4), make(2, 4)))


def _bad_calls() -> Iterator[BadCall]:
    x, w = torch.ones(2, 3), torch.ones(3)
    call: Any = weighted_sum
    yield BadCall("width", lambda: call(x, torch.ones(4)), ValueError, r"weight must be .*D = 3.*\(4,\)")
    yield BadCall("3-d weight", lambda: call(x, torch.ones(1, 1, 3)), ValueError, "weight must be")
    yield BadCall("17 vectors", lambda: call(x, torch.ones(17, 3)), ValueError, "R = 17")
    yield BadCall("0-d x", lambda: call(torch.ones(()), torch.ones(1)), ValueError, "0-d")
    yield BadCall("integer x", lambda: call(x.long(), w), TypeError, "int64")
    yield BadCall("integer y", lambda: call(x, w, out_dtype=torch.int32), TypeError, "out_dtype must be .*int32")
    yield BadCall("list", lambda: call([1.0], torch.ones(1)), TypeError, "x must be a tensor, got list")


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    one, four, sixteen = make(n), make(4, n), make(16, n)
    return {
        "weighted_sum": lambda x: weighted_sum(x, one),
        "weighted_sum, out_dtype": lambda x: weighted_sum(x, one, out_dtype=torch.float32),
        "weighted_sum, fp32 weight": lambda x: weighted_sum(x, one.float()),
        "weighted_sum, four": lambda x: weighted_sum(x, four, out_dtype=torch.float32),
        "weighted_sum, sixteen": lambda x: weighted_sum(x, sixteen, out_dtype=torch.float32),
    }


SPECS = [Spec("weighted_sum", weighted_sum, definition, _samples, tuple(_bad_calls()), of_rows=_of_rows)]
