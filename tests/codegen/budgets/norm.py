"""Kernel budgets of the norms: one compilation per width, dtype and way of working."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.kernel import Kernel, kernel
from onepass.ops.norm import launch

_FORWARD = kernel("ops.norm.kernels", "forward_kernel")
_BACKWARD = kernel("ops.norm.kernels", "backward_kernel")
_TEAM_BACKWARD = kernel("ops.norm.kernels_team", "team_backward_kernel")
_WIDE_FORWARD = kernel("ops.norm.kernels", "wide_forward_kernel")
_FINISH = kernel("ops._shared.kernels_partials", "vector_partials_kernel")


def _team_constants(team: launch.Team) -> dict[str, Any]:
    return {
        "BLOCK_C": team.cols, "TEAM": team.size, "WIDTH": team.width(), "R": team.rows, "LAG": team.lag,
        "STAGES": team.stages, "COOPERATIVE": team.cooperative,
    }  # fmt: skip


_NUMBERS = {"n_rows": "i32", "eps": "fp32", "offset": "fp32"}
_FORWARD_STRIDES = {"x_row_stride": "i32", "r_row_stride": "i32"}
_BACKWARD_STRIDES = {"x_row_stride": "i32", "dy_row_stride": "i32", "ds_row_stride": "i32"}
# the arguments of `forward_kernel` and `backward_kernel` that options need
_TABLES = {"z_row_stride": "i32", "repeat": "i32", "n_entries": "i32"}
_PLAIN_FORWARD = {
    "z_ptr": None, "codes_ptr": None, "scales_ptr": None, "TABLE": False, "TWICE": False, "GATE": 0, "QUANT": 0,
}  # fmt: skip
_PLAIN_BACKWARD = {"z_ptr": None, "b_ptr": None, "dz_ptr": None, "copy_ptr": None, "TABLE": False, "GATE": 0}
_DIVISIBLE = (
    *(f"{p}_ptr" for p in ("x", "r", "w", "b", "y", "s", "dy", "ds", "dx", "dw", "db")),
    "stats_ptr",
    "sums_ptr",
    "partials_ptr",
    "words_ptr",
)
_SHARED_BYTES = 232448  # of an H200
# registers that AMD may spill: its sixteen warps of 64 lanes have 128 registers per thread
_AMD_SPILLS = 52


def _kernels() -> Iterator[Kernel]:
    for t, size in (("bf16", 2), ("fp32", 4)):
        pointers = {f"{p}_ptr": f"*{t}" for p in ("x", "r", "w", "b", "y", "s", "dy", "ds", "dx")}
        floats = {f"{p}_ptr": "*fp32" for p in ("stats", "dw", "db", "sums", "partials")}
        forward = {k: pointers[k] for k in ("x_ptr", "w_ptr", "b_ptr", "y_ptr")}
        forward |= {"stats_ptr": "*fp32"} | _FORWARD_STRIDES | _NUMBERS
        backward = {k: pointers[k] for k in ("dy_ptr", "x_ptr", "w_ptr", "dx_ptr")} | _NUMBERS | _BACKWARD_STRIDES
        backward |= {k: floats[k] for k in ("stats_ptr", "partials_ptr")}
        both = {"NEED_W": True, "NEED_B": True}
        wide = {"VEC": 8, "HAS_MEAN": True}
        plain = wide | {"STABLE": False}
        no_residual, no_ds = {"r_ptr": None, "s_ptr": None}, {"ds_ptr": None}

        for cols, registers in (
            (128, 72), (768, 64), (1024, 80), (3000, 128), (4096, 128), (5120, 144), (8192, 128), (16384, 96),
        ):  # fmt: skip
            tile, early = launch.forward_tile(cols, size), launch.forward_early(cols, size, False, True)
            yield Kernel(
                f"norm forward {t} N={cols}", _FORWARD, forward | _TABLES,
                plain | no_residual | _PLAIN_FORWARD
                | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": early},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers,
            )  # fmt: skip
        tile = launch.forward_tile(128, size)
        inference = {k: v for k, v in forward.items() if k != "stats_ptr"}
        yield Kernel(
            f"norm forward {t} N=128 inference", _FORWARD, inference | _TABLES,
            plain | no_residual | _PLAIN_FORWARD
            | {"stats_ptr": None, "N_COLS": 128, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": False},
            _DIVISIBLE, num_warps=tile.warps, max_registers=72,
        )  # fmt: skip
        # a single program of 8 warps per multiprocessor may use all 255 registers; sm_100 uses the most
        for cols, registers in (
            (128, 192), (768, 224), (1024, 192), (2048, 192), (3000, 224), (4096, 128), (5120, 224), (8192, 128),
        ):  # fmt: skip
            tile = launch.backward_tile(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm backward {t} N={cols}", _BACKWARD, backward | _TABLES,
                plain | both | no_ds | _PLAIN_BACKWARD
                | {"N_COLS": cols, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
                _DIVISIBLE, num_warps=tile.warps, max_registers=registers, max_amd_spills=_AMD_SPILLS,
                # False for chunks of 4 16-bit elements per thread: 8-byte loads, yet faster than chunks of 8
                vector_loads=tile.rows * tile.cols * size >= 16 * 32 * tile.warps,
            )  # fmt: skip
        tile = launch.backward_tile(2048, size, 3, _SHARED_BYTES, stable=True)
        yield Kernel(
            f"norm backward {t} N=2048 stable residual", _BACKWARD,
            backward | _TABLES | {"ds_ptr": pointers["ds_ptr"]},
            plain | both | _PLAIN_BACKWARD
            | {"N_COLS": 2048, "STABLE": True, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "STAGES": tile.stages},
            _DIVISIBLE, num_warps=tile.warps, max_registers=256 * 8 // tile.warps, max_amd_spills=_AMD_SPILLS,
        )  # fmt: skip

        for cols in (40000, 65536, 262144):
            backward_team = launch.backward_team(cols, size, 2, _SHARED_BYTES)
            yield Kernel(
                f"norm team backward {t} N={cols}", _TEAM_BACKWARD,
                {k: v for k, v in backward.items() if k != "eps"} | {"words_ptr": "*i64"},
                wide | both | no_ds | {"N_COLS": cols} | _team_constants(backward_team),
                _DIVISIBLE, num_warps=backward_team.warps, maxnreg=backward_team.registers() or 0, amd=False,
                max_registers=backward_team.registers() or 256 * 8 // backward_team.warps,
                # the rows of two phases fill all registers: 8 bytes spilled on sm_90, 32 on sm_100
                max_spill_bytes=32 if backward_team.lag and size == 2 else 0,
            )  # fmt: skip

        sources = {k: pointers[k] for k in ("r_ptr", "s_ptr")}
        if size == 2:
            tile = launch.forward_tile(32768, size)
            yield Kernel(
                f"norm forward {t} N=32768 residual", _FORWARD, forward | _TABLES | sources,
                plain | _PLAIN_FORWARD
                | {"N_COLS": 32768, "BLOCK_R": tile.rows, "BLOCK_C": tile.cols, "EARLY": False},
                _DIVISIBLE, num_warps=tile.warps, max_registers=64,
            )  # fmt: skip
        for cols, residual in ((24000, False), (40000, True), (65536, False), (65536, True)):
            tile, registers = launch.wide_tile(cols, size, residual)
            yield Kernel(
                f"norm wide forward {t} N={cols}{' residual' * residual}", _WIDE_FORWARD,
                forward | (sources if residual else {}),
                wide | (no_residual, {})[residual] | {"N_COLS": cols, "BLOCK_C": tile.cols, "STAGES": tile.stages},
                _DIVISIBLE, num_warps=tile.warps, maxnreg=registers, max_registers=registers,
            )  # fmt: skip
    yield Kernel(
        "norm finish", _FINISH,
        {"partials_ptr": "*fp32", "dw_ptr": "*bf16", "db_ptr": "*bf16", "n_partials": "i32", "n_entries": "i32"},
        {"N_COLS": 8192, "BLOCK_P": 256, "BLOCK_C": 32, "WAITS": False}, _DIVISIBLE, max_registers=192,
    )  # fmt: skip


KERNELS = list(_kernels())

__all__ = ["KERNELS"]
