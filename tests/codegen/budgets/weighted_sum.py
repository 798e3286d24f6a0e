"""Budgets of the kernels of weighted_sum."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.kernel import Kernel, i32, kernel

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
                kernel("ops.weighted_sum.kernels", "forward_kernel"),
                {k: pointers[k] for k in ("x_ptr", "w_ptr", "y_ptr")} | _UNITS | {"split_tiles": "i32"},
                {"UNIT": unit, "N_VECTORS": vectors, "VECTOR": min(unit, widest), "BLOCK_R": block_r,
                 "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0},
                divisible, num_warps=warps, max_registers=registers, vector_loads=unit >= widest,
            )  # fmt: skip
        for (cols, vectors), (unit, unroll, block_r, block_c, warps, registers) in _BACKWARD[t].items():
            yield Kernel(
                f"weighted_sum backward {t} D={cols} R={vectors}",
                kernel("ops.weighted_sum.kernels", "backward_kernel"),
                {k: pointers[k] for k in ("dy_ptr", "x_ptr", "w_ptr", "dx_ptr")} | {"dw_ptr": "*fp32"} | _UNITS,
                {"UNIT": unit, "N_VECTORS": vectors, "NEED_X": True, "NEED_W": True, "UNROLL": unroll,
                 "BLOCK_R": block_r, "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0},
                divisible, num_warps=warps, max_registers=registers,
                # for sixteen bf16 vectors, registers hold only half a 16-byte load of columns per thread
                vector_loads=unit >= widest and (vectors <= 4 or t == "fp32"),
            )  # fmt: skip
    for (cols, t), (unit, block_r, block_c, stages, warps, registers) in _WEIGHT.items():
        yield Kernel(
            f"weighted_sum dw {t} D={cols}", kernel("ops.weighted_sum.kernels", "weight_kernel"),
            {"dy_ptr": f"*{t}", "x_ptr": f"*{t}", "dw_ptr": "*fp32"} | _UNITS,
            {"UNIT": unit, "BLOCK_R": block_r, "BLOCK_C": block_c, "EVEN_C": cols % block_c == 0, "STAGES": stages},
            divisible, num_warps=warps, max_registers=registers,
        )  # fmt: skip
    for cols in (64, 512, 3000):
        block_c = 64 if cols == 64 else 128
        yield Kernel(
            f"weighted_sum dot bf16 D={cols} R=4", kernel("ops.weighted_sum.kernels", "dot_forward_kernel"),
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
