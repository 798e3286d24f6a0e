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

from onepass.core.launch import INTERPRET

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRET, reason="the interpreter compiles nothing"),
]


def _launched(module: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> dict[str, Any]:
    """Arguments by name and options of the first launch of `call`, of `module` or of a sum of partials."""
    from onepass.ops._shared import kernels_partials

    seen: list[dict[str, Any]] = []

    def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        named = dict(zip(kernel.arg_names, (*tensors, *numbers, *constants), strict=True))
        seen.append({"kernel": kernel, "named": named, "options": options})

    for of in (module, kernels_partials):
        monkeypatch.setattr(of, "launch", launch)
    call()
    return seen[0]


def _weighted_sum(monkeypatch: pytest.MonkeyPatch, x: Tensor, vectors: int) -> dict[str, Any]:
    from onepass.ops.weighted_sum import kernels

    w = x.new_empty(vectors, x.shape[1])
    return _launched(kernels, monkeypatch, lambda: kernels.forward(x, w, None))


def _score(monkeypatch: pytest.MonkeyPatch, x: Tensor, vectors: int) -> dict[str, Any]:
    from onepass.ops.routing import kernels_score

    w = torch.empty(vectors, x.shape[1], device=x.device)
    return _launched(kernels_score, monkeypatch, lambda: kernels_score.forward(x[None], w, 1e-6))


def _ptx(found: dict[str, Any], **options: Any) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(found["named"].items()):
        if isinstance(value, Tensor):
            signature[name] = "*fp32"
            if value.data_ptr() % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
        elif name.isupper():
            signature[name], constants[i,] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=found["kernel"], signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=found["options"] | options)
    return str(compiled.asm["ptx"])


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
    monkeypatch: pytest.MonkeyPatch, launched: Callable[..., Any], shape: tuple[int, int], vectors: int, offset: int
) -> None:
    x = torch.empty(math.prod(shape) + offset)[offset:].view(shape)
    assert _contracted(_ptx(launched(monkeypatch, x, vectors))) == 0


def test_contraction_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _contracted(_ptx(_score(monkeypatch, torch.empty(6, 7), 1), enable_fp_fusion=True)) > 0


@pytest.mark.parametrize("vectors", [1, 4])
@pytest.mark.parametrize("shape", [(37, 1), (37, 7), (37, 64), (37, 100), (37, 3000), (5, 65536)])
def test_products_of_weighted_sum_are_explicit_fma(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], vectors: int
) -> None:
    """A product left to the compiler is contracted in one of two ways: a row's bits would depend on its place."""
    assert "mul.f32" not in _ptx(_weighted_sum(monkeypatch, torch.empty(shape), vectors))


@pytest.mark.parametrize("shape", [(37, 64), (37, 3000), (5, 65536)])
def test_scores_are_never_contracted(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """Two rows of one thread were contracted differently: a score's last bits depended on the token's place."""
    assert _score(monkeypatch, torch.empty(shape), 1)["options"]["enable_fp_fusion"] is False
