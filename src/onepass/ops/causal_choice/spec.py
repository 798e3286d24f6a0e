"""The contract of causal_choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Sample, Spec

from .definition import reference
from .op import causal_choice


def _mask(n: int, device: torch.device) -> Tensor:
    """Return a mask of three rows that drops about 40 % of the tokens, and the whole last row."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(3, n, generator=generator) < 0.6
    mask[-1] = False
    return mask.to(device)


def _samples(make: Callable[..., Tensor]) -> Iterator[Sample]:
    yield Sample("one token", (make(1, 1), 1), {"block": 4, "memory": 4})
    yield Sample("one row", (make(1, 30), 12), {"block": 4, "memory": 8})
    yield Sample("rows", (make(2, 22), 9), {"block": 4, "memory": 8})
    yield Sample("all tokens", (make(2, 9), 12), {"block": 8, "memory": 8})
    yield Sample("part of a block at the end", (make(1, 301), 40), {"block": 32, "memory": 64, "eps": 0.1})
    yield Sample("first block in two parts", (make(1, 320), 25), {"block": 64, "memory": 128})
    yield Sample("blocks of no power of two", (make(1, 320), 160), {"block": 40, "memory": 80})
    scores = make(3, 101)
    yield Sample("mask", (scores, 40), {"block": 32, "memory": 64, "mask": _mask(101, scores.device)})
    yield Sample("share", (make(2, 101), 0.23), {"block": 32, "memory": 64})
    yield Sample("share and mask", (make(3, 44), 0.3), {"block": 8, "memory": 16, "mask": _mask(44, scores.device)})
    yield Sample("all by share", (make(2, 9), 1.0), {"block": 8, "memory": 8})
    yield Sample("none", (make(2, 5), 0))
    yield Sample("no tokens", (make(2, 0), 3))
    yield Sample("no batch", (make(0, 5), 3))


_S = torch.ones(2, 6)
_BAD = (
    BadCall("1-d scores", lambda: causal_choice(torch.ones(6), 1), ValueError, r"scores must be \(batch, n\)"),
    BadCall("integers", lambda: causal_choice(_S.long(), 1), TypeError, "int64"),
    BadCall("k", lambda: causal_choice(_S, -1), ValueError, "k must be ≥ 0, got -1"),
    BadCall("share", lambda: causal_choice(_S, 1.5), ValueError, r"int ≥ 0 or a share 0 < k ≤ 1, got 1\.5"),
    BadCall("text k", lambda: causal_choice(_S, "1"), TypeError, "k must be an int, got str"),  # type: ignore[arg-type]
    BadCall("eps", lambda: causal_choice(_S, 1, eps=0.0), ValueError, "eps must be > 0, got 0.0"),
    BadCall("infinite eps", lambda: causal_choice(_S, 1, eps=math.inf), ValueError, "eps must be ≤ .*, got inf"),
    BadCall("eps tensor", lambda: causal_choice(_S, 1, eps=_S), TypeError, "eps must be a number > 0, got Tensor"),  # type: ignore[arg-type]
    BadCall("block", lambda: causal_choice(_S, 1, block=0), ValueError, "block must be ≥ 1, got 0"),
    BadCall("memory", lambda: causal_choice(_S, 1, block=8, memory=12), ValueError, "multiple of block = 8, got 12"),
    BadCall("mask", lambda: causal_choice(_S, 1, mask=_S[1:] > 0), ValueError, r"mask must.* = \(2, 6\), got \(1, 6\)"),
    BadCall("real mask", lambda: causal_choice(_S, 1, mask=_S), TypeError, "mask must be bool"),
)

SPECS = [Spec("causal_choice", causal_choice, reference, _samples, _BAD)]
