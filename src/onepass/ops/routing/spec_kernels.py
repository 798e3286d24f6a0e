"""What the routing kernels may cost in registers, at the widths that blocks have."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from onepass.core.spec import Kernel


def _kernel(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"{__package__}.{module}"), name)


def _i32(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _pointers(signature: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name, t in signature.items() if t.startswith("*"))


def _rows(t: str) -> Iterator[Kernel]:
    wide = t == "fp32"
    counts = _i32("n", "k", "total")
    signature = {"x_ptr": f"*{t}", "index_ptr": "*i64", "y_ptr": f"*{t}", **_i32("x_batch_stride", "x_row_stride")}
    shape = {"D": 1024, "BLOCK_R": 4, "BLOCK_C": 1024}
    yield Kernel(
        f"routing gather {t}", _kernel("kernels_triton", "gather_kernel"), signature | counts, shape | {"VEC": 8},
        _pointers(signature), max_registers=48 if wide else 40,
    )  # fmt: skip
    signature = {"y_ptr": f"*{t}", "u_ptr": f"*{t}", "g_ptr": "*fp32", "index_ptr": "*i64"}
    yield Kernel(
        f"routing add {t}", _kernel("kernels_triton", "add_kernel"), signature | counts | _i32("routes", "route"),
        shape, _pointers(signature), max_registers=72,
    )  # fmt: skip
    signature = {
        "dy_ptr": f"*{t}", "u_ptr": f"*{t}", "g_ptr": "*fp32", "index_ptr": "*i64", "du_ptr": f"*{t}",
        "dg_ptr": "*fp32", **_i32("dy_batch_stride", "dy_row_stride"),
    }  # fmt: skip
    yield Kernel(
        f"routing add backward {t}", _kernel("kernels_triton", "add_backward_kernel"), signature | counts,
        shape | {"VEC": 8}, _pointers(signature), max_registers=88 if wide else 64,
    )  # fmt: skip


# (vectors) → forward: BLOCK_R, registers; backward: UNROLL, BLOCK_R, BLOCK_C, registers
_SCORE = {
    "bf16": {1: (2, 40, 4, 2, 1024, 80), 4: (4, 96, 2, 2, 1024, 128), 16: (4, 176, 1, 1, 512, 136)},
    "fp32": {1: (2, 40, 4, 2, 512, 64), 4: (2, 64, 1, 2, 512, 88), 16: (2, 112, 1, 1, 256, 88)},
}


def _score(t: str) -> Iterator[Kernel]:
    vector = 4 if t == "fp32" else 8
    common = {"x_ptr": f"*{t}", "v_ptr": "*fp32", "s_ptr": "*fp32", "inverse_ptr": "*fp32"}
    common |= _i32("x_batch_stride", "x_row_stride", "n", "total")
    for r, (block_r, registers, unroll, rows, cols, more) in _SCORE[t].items():
        shape = {"D": 1024, "VEC": 8, "R": r}
        yield Kernel(
            f"routing score {t} R={r}", _kernel("kernels_score", "forward_kernel"), common | {"eps": "fp32"},
            shape | {"VECTOR": vector, "BLOCK_R": block_r, "BLOCK_C": 128 * vector}, _pointers(common),
            max_registers=registers,
        )  # fmt: skip
        signature = common | {"ds_ptr": "*fp32", "dx_ptr": f"*{t}", "dv_ptr": "*fp32"}
        yield Kernel(
            f"routing score backward {t} R={r}", _kernel("kernels_score", "backward_kernel"), signature,
            shape | {"UNROLL": unroll, "BLOCK_R": rows, "BLOCK_C": cols}, _pointers(signature), num_warps=8,
            max_registers=more,
            # sixteen vectors leave registers for half a vector of columns
            vector_loads=r < 16,
        )  # fmt: skip


# (dtype of x, width, scores, of some tokens or of all, or a choice of rows) → forward: BLOCK_C, warps, registers;
# backward: BLOCK_R, BLOCK_C, warps, stages, registers
_NORM = {
    ("fp32", 512, "scores"): (256, 2, 40, 2, 512, 4, 3, 128),
    ("fp32", 1024, "scores"): (256, 2, 56, 1, 1024, 4, 3, 128),
    ("fp32", 1024, "rows"): (256, 2, 40, 1, 1024, 4, 3, 104),
    ("bf16", 1024, "scores"): (512, 2, 56, 1, 1024, 4, 3, 128),
    ("bf16", 1024, "rows"): (512, 2, 40, 1, 1024, 4, 3, 104),
    ("bf16", 2048, "scores"): (512, 2, 72, 1, 1024, 8, 3, 112),
    ("bf16", 4096, "scores"): (1024, 4, 72, 1, 4096, 16, 2, 112),
    ("fp32", 1024, "masked scores"): (256, 2, 56, 1, 1024, 4, 3, 128),
    ("bf16", 1024, "masked scores"): (512, 2, 56, 1, 1024, 4, 3, 128),
}


def _norm() -> Iterator[Kernel]:
    for (t, d, what), (cols, warps, registers, rows, b_cols, b_warps, stages, more) in _NORM.items():
        common = {"x_ptr": f"*{t}", "w_ptr": "*fp32", "stats_ptr": "*fp32"}
        common |= _i32("x_batch_stride", "x_row_stride", "n", "m", "total")
        scored, masked = "scores" in what, "masked" in what
        shape: dict[str, Any] = {"D": d, "VEC": 8, "R": int(scored)}
        if masked:
            common |= {"mask_ptr": "*u8"}
        else:
            shape |= {"mask_ptr": None}
        if scored:
            common |= {"v_ptr": "*fp32", "s_ptr": "*fp32"}
            shape |= {"index_ptr": None}
        else:
            common |= {"index_ptr": "*i64"}
            shape |= {"v_ptr": None, "s_ptr": None}
        signature = common | {"y_ptr": "*bf16", "eps": "fp32", "score_eps": "fp32"}
        yield Kernel(
            f"routing norm {t} D={d} {what}", _kernel("kernels_norm", "forward_kernel"), signature,
            shape | {"BLOCK_R": 1, "BLOCK_C": cols}, _pointers(signature), num_warps=warps, max_registers=registers,
        )  # fmt: skip
        signature = common | {"dy_ptr": "*bf16", "dx_ptr": f"*{t}", "parts_ptr": "*fp32"}
        signature |= _i32("every", "n_push", "parts_stride")
        if scored:
            signature |= {"ds_ptr": "*fp32", "push_ptr": "*fp32"}
        else:
            shape |= {"ds_ptr": None, "push_ptr": None}
        yield Kernel(
            f"routing norm backward {t} D={d} {what}", _kernel("kernels_norm", "backward_kernel"), signature,
            shape | {"BLOCK_R": rows, "BLOCK_C": b_cols, "STAGES": stages}, _pointers(signature), num_warps=b_warps,
            max_registers=more,
        )  # fmt: skip


# dtype → BLOCK_R, BLOCK_C, registers of the sums, of GELU's gradient
_BRANCH = {"bf16": (2, 1024, 80, 80), "fp32": (2, 512, 64, 64)}


def _branch() -> Iterator[Kernel]:
    for t, (block_r, block_c, sums, gelu) in _BRANCH.items():
        shape = {"D": 1024, "OFFSET": 512, "BLOCK_R": block_r, "BLOCK_C": block_c}
        common = {"parts_ptr": "*fp32", **_i32("total", "parts_stride")}
        signature = common | {"x_ptr": f"*{t}"}
        yield Kernel(
            f"routing column sums {t}", _kernel("kernels_branch", "sums_kernel"), signature, shape | {"UNROLL": 4},
            _pointers(signature), num_warps=8, max_registers=sums,
        )  # fmt: skip
        signature = common | {"dh_ptr": f"*{t}", "u_ptr": f"*{t}"}
        yield Kernel(
            f"routing gelu backward {t}", _kernel("kernels_branch", "gelu_backward_kernel"), signature,
            shape | {"UNROLL": 4}, _pointers(signature), num_warps=8, max_registers=gelu,
        )  # fmt: skip
        signature = {"dy_ptr": f"*{t}", "length_ptr": "*fp32", **_i32("n", "every", "count", "total")}
        yield Kernel(
            f"routing probe {t}", _kernel("kernels_probe", "length_kernel"), signature,
            {"D": 1024, "BLOCK_R": 4, "BLOCK_C": 1024}, _pointers(signature), max_registers=64,
        )  # fmt: skip
    tensors = [f"{side}{i}" for side in "ab" for i in range(8)]
    signature = {name: "*fp32" if name[0] == "a" else "*bf16" for name in tensors} | _i32(*(f"n{i}" for i in range(8)))
    yield Kernel(
        "routing cast", _kernel("kernels_cast", "cast_kernel"), signature,
        {"UNIT": 16, "BLOCK": 4096}, _pointers(signature),
        max_registers=64,
    )  # fmt: skip
    signature = {"length_ptr": "*fp32", "mask_ptr": "*u8", "push_ptr": "*fp32", **_i32("every", "count", "mask_stride")}
    yield Kernel(
        "routing probe, centred", _kernel("kernels_probe", "centre_kernel"), signature | {"scale": "fp32"},
        {"BLOCK": 1024}, _pointers(signature), max_registers=64, vector_loads=False,
    )  # fmt: skip


KERNELS = [kernel for t in ("bf16", "fp32") for part in (_rows, _score) for kernel in part(t)] + list(_norm())
KERNELS += list(_branch())
