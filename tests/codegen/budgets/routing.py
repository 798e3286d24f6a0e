"""Register budgets of the routing kernels, at a usual width of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.kernel import Kernel, i32, kernel, pointers


def _rows(t: str) -> Iterator[Kernel]:
    wide = t == "fp32"
    counts = i32("n", "k", "total")
    signature = {"x_ptr": f"*{t}", "index_ptr": "*i64", "y_ptr": f"*{t}", **i32("x_batch_stride", "x_row_stride")}
    shape = {"D": 1024, "BLOCK_R": 4, "BLOCK_C": 1024}
    yield Kernel(
        f"routing gather {t}", kernel("ops.routing.kernels", "gather_kernel"), signature | counts,
        shape | {"VEC": 8},
        pointers(signature), max_registers=48 if wide else 40,
    )  # fmt: skip
    signature = {"y_ptr": f"*{t}", "u_ptr": f"*{t}", "g_ptr": "*fp32", "index_ptr": "*i64"}
    yield Kernel(
        f"routing add {t}", kernel("ops.routing.kernels", "add_kernel"), signature | counts | i32("routes",
        "route"),
        shape | {"shift_ptr": None}, pointers(signature), max_registers=72,
    )  # fmt: skip
    signature = {
        "dy_ptr": f"*{t}", "u_ptr": f"*{t}", "g_ptr": "*fp32", "index_ptr": "*i64", "du_ptr": f"*{t}",
        "dg_ptr": "*fp32", **i32("dy_batch_stride", "dy_row_stride"),
    }  # fmt: skip
    yield Kernel(
        f"routing add backward {t}", kernel("ops.routing.kernels", "add_backward_kernel"), signature | counts,
        shape | {"VEC": 8, "shift_ptr": None}, pointers(signature), max_registers=88 if wide else 64,
    )  # fmt: skip


# dtype, number of vectors → forward: BLOCK_R, registers; backward: UNROLL, BLOCK_R, BLOCK_C, registers
_SCORE = {
    "bf16": {1: (2, 40, 4, 2, 1024, 80), 4: (4, 96, 2, 2, 1024, 128), 16: (4, 176, 1, 1, 512, 136)},
    "fp32": {1: (2, 40, 4, 2, 512, 64), 4: (2, 64, 1, 2, 512, 88), 16: (2, 112, 1, 1, 256, 88)},
}


def _score(t: str) -> Iterator[Kernel]:
    vector = 4 if t == "fp32" else 8
    common = {"x_ptr": f"*{t}", "v_ptr": "*fp32", "s_ptr": "*fp32", "inverse_ptr": "*fp32"}
    common |= i32("x_batch_stride", "x_row_stride", "n", "total")
    for r, (block_r, registers, unroll, rows, cols, more) in _SCORE[t].items():
        shape = {"D": 1024, "VEC": 8, "R": r}
        yield Kernel(
            f"routing score {t} R={r}", kernel("ops.routing.kernels_score", "forward_kernel"), common | {"eps": "fp32"},
            shape | {"VECTOR": vector, "BLOCK_R": block_r, "BLOCK_C": 128 * vector}, pointers(common),
            max_registers=registers,
        )  # fmt: skip
        signature = common | {"ds_ptr": "*fp32", "dx_ptr": f"*{t}", "dv_ptr": "*fp32"}
        yield Kernel(
            f"routing score backward {t} R={r}", kernel("ops.routing.kernels_score", "backward_kernel"), signature,
            shape | {"UNROLL": unroll, "BLOCK_R": rows, "BLOCK_C": cols}, pointers(signature), num_warps=8,
            max_registers=more,
            # sixteen vectors leave registers for 8-byte loads only
            vector_loads=r < 16,
        )  # fmt: skip


KERNELS = [found for t in ("bf16", "fp32") for part in (_rows, _score) for found in part(t)]
