"""The contract that an operator declares in its `spec.py` as SPECS, for tests/contract and `onepass doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """One call of an operator: `op(*args, **kwargs)`; floating-point tensors in args and kwargs may need gradients."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never mutated


class BadCall(NamedTuple):
    """A call that must raise: the exception's type and a pattern for its message."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    match: str


# |ours − float64| ≤ t + t·|float64|: errors of rounding, and of sums in fp32; of gradients GRADIENT times as much
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
GRADIENT = 4.0


@dataclass(frozen=True)
class Spec:
    """A functional operator's contract.

    Attributes:
        name: the public name.
        op: the public function.
        reference: the definition in plain torch, same signature; differentiable by autograd; run in float64 by tests.
        samples: `samples(make)` yields `Sample`s; `make(*shape)` gives a random tensor of the dtype and device
            under test (fixed seed), so one declaration serves every dtype and device.
        bad_calls: calls that must raise.
        of_rows: `of_rows(make, width)` returns functions by name; each maps a tensor (rows, width) to (rows, ...), and
            the bits of a row must depend on this row alone (docs/reliability.md).
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[Callable[..., Tensor]], Iterator[Sample]]
    bad_calls: Sequence[BadCall] = ()
    of_rows: Callable[[Callable[..., Tensor], int], Mapping[str, Callable[[Tensor], Any]]] = lambda make, width: {}
