"""Samples, bad calls, kernel budgets and bench cases of `weighted_sum`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall, Case, Kernel, Sample, Spec
from onepass.ops._shared.spec_parts import i32, kernel

from .op import backward_op, forward_op, weighted_sum
from .reference import reference


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


def _opchecks() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    for w in (torch.randn(10), torch.randn(3, 10)):
        x = torch.randn(2, 6, 10, requires_grad=True)
        y = torch.randn(x.shape[:-1] + w.shape[:-1])
        yield forward_op, (x, w.requires_grad_(), torch.float32)
        yield backward_op, (y, x.detach(), w.detach(), True, True)
        yield backward_op, (y, x.detach(), w.detach(), False, True)


_BAD = (
    BadCall(
        "width", lambda: weighted_sum(torch.ones(2, 3), torch.ones(4)), ValueError, r"weight must be .*D = 3.*\(4,\)"
    ),
    BadCall("3-d weight", lambda: weighted_sum(torch.ones(2, 3), torch.ones(1, 1, 3)), ValueError, "weight must be"),
    BadCall("17 vectors", lambda: weighted_sum(torch.ones(2, 3), torch.ones(17, 3)), ValueError, "R = 17"),
    BadCall("0-d x", lambda: weighted_sum(torch.ones(()), torch.ones(1)), ValueError, "0-d"),
    BadCall("integer x", lambda: weighted_sum(torch.ones(2, 3, dtype=torch.int64), torch.ones(3)), TypeError, "int64"),
    BadCall(
        "integer result",
        lambda: weighted_sum(torch.ones(2, 3), torch.ones(3), out_dtype=torch.int32),
        TypeError,
        "out_dtype must be .*int32",
    ),
    BadCall("list", lambda: weighted_sum([1.0], torch.ones(1)), TypeError, "x must be a tensor, got list"),  # type: ignore[arg-type]
)


def _of_rows(make: Callable[..., Tensor], n: int) -> Mapping[str, Callable[[Tensor], Any]]:
    one, four, sixteen = make(n), make(4, n), make(16, n)
    return {
        "weighted_sum": lambda x: weighted_sum(x, one),
        "weighted_sum, out_dtype": lambda x: weighted_sum(x, one, out_dtype=torch.float32),
        "weighted_sum, fp32 weight": lambda x: weighted_sum(x, one.float()),
        "weighted_sum, four": lambda x: weighted_sum(x, four, out_dtype=torch.float32),
        "weighted_sum, sixteen": lambda x: weighted_sum(x, sixteen, out_dtype=torch.float32),
    }


SPECS = [
    Spec(
        name="weighted_sum",
        op=weighted_sum,
        reference=reference,
        samples=_samples,
        bad_calls=_BAD,
        opchecks=_opchecks,
        of_rows=_of_rows,
    )
]


_UNITS = i32("x_row_units", "n_rows", "n_col_units")
# launch shapes of some widths with a register budget each, for bf16 and fp32
# (width, vectors) → UNIT, BLOCK_R, BLOCK_C, warps, registers
_FORWARD = {
    "bf16": {
        (64, 1): (16, 64, 64, 4, 64),
        (512, 1): (16, 8, 512, 4, 64),
        (3000, 1): (8, 4, 1024, 4, 64),
        (4096, 1): (16, 4, 1024, 4, 64),
        (100, 4): (4, 8, 128, 1, 152),
        (4096, 16): (16, 2, 1024, 4, 144),
    },
    "fp32": {
        (64, 1): (16, 32, 64, 4, 64),
        (100, 1): (4, 16, 128, 4, 64),
        (512, 4): (16, 2, 512, 1, 128),
        (4096, 1): (16, 2, 512, 4, 48),
        (4096, 4): (16, 8, 256, 2, 112),
    },
}
# (width, vectors) → UNIT, UNROLL, BLOCK_R, BLOCK_C, warps, registers
_BACKWARD = {
    "bf16": {
        (64, 1): (16, 8, 32, 64, 8, 96),
        (512, 1): (16, 8, 2, 512, 4, 96),
        (3000, 1): (8, 8, 1, 1024, 4, 80),
        (4096, 1): (16, 8, 1, 1024, 4, 80),
        (4096, 4): (16, 4, 1, 1024, 4, 128),
        (4096, 16): (16, 2, 1, 512, 4, 255),
    },
    "fp32": {
        (64, 1): (16, 8, 16, 64, 8, 80),
        (4096, 1): (16, 8, 1, 512, 4, 80),
        (4096, 4): (16, 4, 1, 512, 4, 96),
    },
}
# (width, dtype) → UNIT, BLOCK_R, BLOCK_C, STAGES, warps, registers
_WEIGHT = {
    (64, "fp32"): (16, 64, 64, 4, 8, 80),
    (4096, "fp32"): (16, 4, 512, 4, 4, 80),
    (3000, "bf16"): (8, 4, 1024, 4, 4, 96),
    (4096, "bf16"): (16, 4, 1024, 4, 4, 96),
}


def _kernels() -> Iterator[Kernel]:
    divisible = ("x_ptr", "w_ptr", "y_ptr", "dy_ptr", "dx_ptr", "dw_ptr")
    for t in ("bf16", "fp32"):
        pointers = {f"{p}_ptr": f"*{t}" for p in ("dy", "x", "w", "y", "dx")}
        widest = 8 if t == "bf16" else 4
        for (cols, vectors), (unit, block_r, block_c, warps, registers) in _FORWARD[t].items():
            yield Kernel(
                f"weighted_sum forward {t} D={cols} R={vectors}",
                kernel("ops.weighted_sum.kernels_triton", "forward_kernel"),
                {k: pointers[k] for k in ("x_ptr", "w_ptr", "y_ptr")} | _UNITS | {"split_tiles": "i32"},
                {"UNIT": unit, "N_VECTORS": vectors, "VECTOR": min(unit, widest), "BLOCK_R": block_r,
                 "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0},
                divisible, num_warps=warps, max_registers=registers, vector_loads=unit >= widest,
            )  # fmt: skip
        for (cols, vectors), (unit, unroll, block_r, block_c, warps, registers) in _BACKWARD[t].items():
            yield Kernel(
                f"weighted_sum backward {t} D={cols} R={vectors}",
                kernel("ops.weighted_sum.kernels_triton", "backward_kernel"),
                {k: pointers[k] for k in ("dy_ptr", "x_ptr", "w_ptr", "dx_ptr")} | {"dw_ptr": "*fp32"} | _UNITS,
                {"UNIT": unit, "N_VECTORS": vectors, "NEED_X": True, "NEED_W": True, "UNROLL": unroll,
                 "BLOCK_R": block_r, "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0},
                divisible, num_warps=warps, max_registers=registers,
                # for sixteen bf16 vectors, registers hold only half a 16-byte load of columns per thread
                vector_loads=unit >= widest and (vectors <= 4 or t == "fp32"),
            )  # fmt: skip
    for (cols, t), (unit, block_r, block_c, stages, warps, registers) in _WEIGHT.items():
        yield Kernel(
            f"weighted_sum dw {t} D={cols}", kernel("ops.weighted_sum.kernels_triton", "weight_kernel"),
            {"dy_ptr": f"*{t}", "x_ptr": f"*{t}", "dw_ptr": "*fp32"} | _UNITS,
            {"UNIT": unit, "BLOCK_R": block_r, "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0, "STAGES": stages},
            divisible, num_warps=warps, max_registers=registers,
        )  # fmt: skip
    for cols in (64, 512, 3000):
        block_c = 64 if cols == 64 else 128
        yield Kernel(
            f"weighted_sum dot bf16 D={cols} R=4", kernel("ops.weighted_sum.kernels_triton", "dot_forward_kernel"),
            {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16"} | _UNITS | {"split_tiles": "i32"},
            {"UNIT": 8 if cols == 3000 else 16, "N_VECTORS": 4, "BLOCK_R": 64, "BLOCK_C": block_c,
             "EVEN_C": cols % block_c == 0, "STAGES": 4},
            divisible, num_warps=4, max_registers=128,
        )  # fmt: skip
    yield Kernel(
        "sum of partials", kernel("ops._shared.kernels_partials", "partials_kernel"),
        {"partials_ptr": "*fp32", "out_ptr": "*bf16", "n_partials": "i32", "n_units": "i32"},
        {"UNIT": 16, "BLOCK_P": 256, "BLOCK_C": 16}, ("partials_ptr", "out_ptr"), max_registers=96,
    )  # fmt: skip


KERNELS = list(_kernels())


def _impls(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    compiled = torch.compile(lambda a, b: (a * b).sum(-1))
    return {
        "onepass": lambda: weighted_sum(x, w),
        "x @ w": lambda: x @ w,
        "(x*w).sum": lambda: (x * w).sum(-1),
        "einsum": lambda: torch.einsum("nd,d->n", x, w),
        "torch.compile (x*w).sum": lambda: compiled(x, w),
    }


def _case(rows: int, cols: int, dtype: torch.dtype, stage: str, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Callable[[], Any]]:
        need = stage == "backward"
        x = torch.randn(rows, cols, device=device, dtype=dtype).requires_grad_(need)
        w = torch.randn(cols, device=device, dtype=dtype).requires_grad_(need)
        impls = _impls(x, w)
        if not need:
            return impls
        dy = torch.randn(rows, device=device, dtype=dtype)

        def grads(y: Tensor) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True)

        return {name: grads(f()) for name, f in impls.items()}

    floor = rows * cols * dtype.itemsize * (1 if stage == "forward" else 2)
    return Case("weighted_sum", stage, {"rows": rows, "cols": cols}, dtype, floor, make, 2e-2, device)


def _vectors_case(rows: int, cols: int, vectors: int, device: str = "cuda") -> Case:
    def make() -> Mapping[str, Callable[[], Any]]:
        x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
        w = torch.randn(vectors, cols, device=device, dtype=torch.bfloat16)
        return {"onepass": lambda: weighted_sum(x, w), "x @ w": lambda: x @ w.mT}

    params = {"rows": rows, "cols": cols, "vectors": vectors}
    return Case("weighted_sum", "forward", params, torch.bfloat16, rows * cols * 2, make, 2e-2, device)


_SIZES = ((1048576, 64), (131072, 320), (262144, 512), (65536, 4096), (8192, 32768))
_CPU_SIZES = ((65536, 64), (8192, 512), (2048, 4096))
CASES = [
    _case(rows, cols, dtype, stage, device)
    for device, sizes in (("cuda", _SIZES), ("cpu", _CPU_SIZES))
    for rows, cols in sizes
    for dtype in (torch.bfloat16, torch.float32)
    for stage in ("forward", "backward")
] + [
    _vectors_case(rows, cols, vectors, device)
    for device, sizes in (("cuda", ((262144, 512), (65536, 4096))), ("cpu", ((8192, 512),)))
    for rows, cols in sizes
    for vectors in (4, 16)
]
