"""Lanes that hold copies of one sum of products agree on every bit of it.

A sum across lanes adds what a shuffle brought to a lane's own part. Both lanes of a pair get the same bits, for
addition commutes; not so where a lane's own part is a bare product that the compiler contracts into the addition: one
computes fma(x, w, x'·w' rounded), the other fma(x', w', x·w rounded). What they then store for the next step is a race.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.launched import GPUS, Launch, on
from onepass import weighted_sum
from onepass.core.launch import INTERPRET
from onepass.ops.routing.op import score

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing"),
]


def _weighted_sum(x: Tensor, vectors: int) -> Launch:
    """The first launch of a weighted sum."""
    with on(GPUS["sm_90"]) as launched:
        weighted_sum(x, torch.empty(vectors, x.shape[1], device="meta"))
    return launched[0]


def _score(x: Tensor, vectors: int) -> Launch:
    with on(GPUS["sm_90"]) as launched:
        score(x[None], torch.empty(vectors, x.shape[1], device="meta"))
    return launched[0]


def _ptx(launch: Launch, **options: Any) -> str:
    from triton.backends.compiler import GPUTarget

    changed = launch._replace(options=tuple((dict(launch.options) | options).items()))
    return str(changed.compile(GPUTarget("cuda", 90, 32)).asm["ptx"])


def _contracted(ptx: str) -> int:
    """Products that are contracted into the addition of what a shuffle brought."""
    brought = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    brought |= {to for to, of in re.findall(r"mov\.b32\s+(%\w+), (%\w+);", ptx) if of in brought}
    return sum(addend in brought for addend in re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))


# fewer elements than threads or vectors; a single tile of an odd width; a whole tile; one that starts off 16 bytes,
# where loads of single elements leave the neighbours to other lanes
@pytest.mark.parametrize(
    ("launched", "shape", "vectors", "offset"),
    [
        (_weighted_sum, (6, 10), 1, 0), (_weighted_sum, (5, 70), 4, 0), (_weighted_sum, (1, 64), 1, 0),
        (_weighted_sum, (64, 64), 1, 0), (_weighted_sum, (64, 64), 1, 1),
        (_score, (6, 8), 1, 0), (_score, (3, 130), 16, 0), (_score, (99, 7), 1, 0),
        (_score, (64, 64), 1, 0), (_score, (64, 64), 1, 1),
    ],
)  # fmt: skip
def test_no_product_is_contracted_into_a_sum_across_lanes(
    launched: Callable[..., Launch], shape: tuple[int, int], vectors: int, offset: int
) -> None:
    x = torch.empty(math.prod(shape) + offset, device="meta")[offset:].view(shape)
    assert _contracted(_ptx(launched(x, vectors))) == 0


def test_contraction_is_seen() -> None:
    assert _contracted(_ptx(_score(torch.empty(6, 7, device="meta"), 1), enable_fp_fusion=True)) > 0


@pytest.mark.parametrize("vectors", [1, 4])
@pytest.mark.parametrize("shape", [(37, 1), (37, 7), (37, 64), (37, 100), (37, 3000), (5, 65536)])
def test_products_of_weighted_sum_are_explicit_fma(shape: tuple[int, int], vectors: int) -> None:
    """A product left to the compiler is contracted in one of two ways: a row's bits would depend on its place."""
    assert "mul.f32" not in _ptx(_weighted_sum(torch.empty(shape, device="meta"), vectors))


@pytest.mark.parametrize("shape", [(37, 64), (37, 3000), (5, 65536)])
def test_scores_are_never_contracted(shape: tuple[int, int]) -> None:
    """Two rows of one thread were contracted differently: a score's last bits depended on the token's place."""
    assert dict(_score(torch.empty(shape, device="meta"), 1).options)["enable_fp_fusion"] is False
