"""Budgets of the kernels of topk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from codegen.kernel import Kernel
from onepass.core.launch import triton_installed
from onepass.ops.topk import plan

_INTS = (
    "g_row_stride", "g_col_stride", "s_row_stride", "mask_row_stride", "start_stride", "lengths_stride",
    "packed_row_stride", "out_row_stride", "n_rows", "n_cols", "tiles", "k", "run", "steps", "capacity",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_INTS, "i32"),
    **dict.fromkeys(("s_ptr", "y_ptr", "value_ptr", "gate_ptr", "g_ptr", "ds_ptr", "pivot_ptr"), "*fp32"),
    **dict.fromkeys(("packed_ptr", "out_ptr", "index_ptr", "candidates_ptr", "start_ptr"), "*i64"),
    **dict.fromkeys(("state_ptr", "lengths_ptr", "groups_ptr"), "*i32"),
}


def _kernel(
    title: str, fn: Any, constants: dict[str, Any], warps: int, registers: int, *, wide: bool = True, spill: int = 0,
    limit: int | None = None, amd: int = 0, **types: str,
) -> Kernel:  # fmt: skip
    signature = {a: t for a, t in {**_TYPES, **types}.items() if a in fn.arg_names and a not in constants}
    pointers = [a for a in signature if a.endswith("_ptr")]
    return Kernel(
        title, lambda: fn, signature, constants, pointers, num_warps=warps, maxnreg=limit or 0, max_registers=registers,
        max_spill_bytes=spill, max_amd_spills=amd or (111 if registers > 128 else 0), vector_loads=wide,
    )  # fmt: skip


def _in_one_launch(plain: dict[str, Any], dtypes: dict[str, torch.dtype]) -> Iterator[Kernel]:
    """Rows that one program selects, sorts and fetches from."""
    from onepass.ops.topk import kernels_pivot, kernels_whole

    for dtype, n_rows, cols, k in (
        ("fp32", 1 << 16, 64, 8), ("bf16", 1 << 15, 256, 8), ("fp32", 4096, 65536, 32), ("bf16", 1 << 14, 24576, 64),
        ("fp32", 4096, 1024, 64), ("fp32", 8192, 8192, 2048), ("bf16", 8192, 8192, 2048), ("fp32", 8192, 16384, 2048),
    ):  # fmt: skip
        one = plan.of_selection(n_rows, cols, k, dtypes[dtype].itemsize, 132)
        shift = plan.constant_bits(dtypes[dtype])
        constants: dict[str, Any] = {**plain, "y_ptr": None, "SHIFT": shift, "SORTED": True}
        for_all: dict[str, Any] = {"s_ptr": f"*{dtype}", "value_ptr": f"*{dtype}", "gate_ptr": f"*{dtype}"}
        if isinstance(one, plan.Narrow):
            blocks: dict[str, Any] = {
                "PARTS": one.parts, "BLOCK_R": one.block_r, "BLOCK_C": one.block_c, "BLOCK_K": one.block_k,
            }  # fmt: skip
            kernel = kernels_whole.narrow_kernel
            yield _kernel(f"topk narrow {dtype} {cols}", kernel, constants | blocks, one.warps, 80, **for_all)
        elif isinstance(one, plan.Wide):
            blocks = {
                "CHUNK": one.chunk, "GROUP": one.group, "GROUPS": one.groups, "AGAIN": one.again, "ROOM": one.room,
            }  # fmt: skip
            kernel = kernels_pivot.wide_kernel
            yield _kernel(f"topk wide {dtype} {cols}", kernel, constants | blocks, one.warps, 120, **for_all)
        else:
            assert isinstance(one, plan.Whole)
            blocks = {
                "BLOCK_R": one.block_r, "BLOCK_C": one.block_c, "BLOCK_K": one.block_k,
                "VECTOR": plan.VECTOR // dtypes[dtype].itemsize,
            }  # fmt: skip
            packed: dict[str, Any] = {} if k > plan.SORTED_BY_WHOLE else {"packed_ptr": None}
            for_all |= {"packed_ptr": "*i32" if dtype == "bf16" else "*i64"}
            kernel, constants = kernels_whole.whole_kernel, constants | packed
            yield _kernel(
                f"topk whole {dtype} {cols}", kernel, constants | blocks, one.warps, 128,
                spill=8 if one.registers else 0, limit=one.registers, **for_all,
            )  # fmt: skip


def _kernels() -> Iterator[Kernel]:
    if not triton_installed():
        return
    from onepass.ops.topk import kernels_pivot as kp
    from onepass.ops.topk import kernels_select as kb
    from onepass.ops.topk import kernels_sort as ks

    ranged: dict[str, Any] = {"mask_ptr": None, "UNIT": 16, "LARGEST": True}
    plain = ranged | {"start_ptr": None, "lengths_ptr": None}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    yield from _in_one_launch(plain, dtypes)
    for dtype, n_rows, k in (("fp32", 64, 2048), ("fp32", 2048, 2048), ("bf16", 64, 2048), ("fp32", 8, 65536)):
        for options in (plain, ranged):
            long = plan.of_selection(n_rows, 131072, k, dtypes[dtype].itemsize, 132)
            assert isinstance(long, plan.Pivot)
            title = f"{dtype} {n_rows} {k}{', ranges' if options is ranged else ''}"
            shift, alone, pointer = plan.constant_bits(dtypes[dtype]), long.splits == 1, f"*{dtype}"
            sample = {"DISORDERED": 1, "SIGMAS": plan.SIGMAS, "GROUPS": long.groups, "GROUP": long.group}
            yield _kernel(
                f"topk pivot {title}", kp.pivot_kernel, {**options, "SHIFT": shift, **sample}, long.sample_warps,
                160 if alone and options is ranged else 144, spill=120, s_ptr=pointer,
            )  # fmt: skip
            blocks = {
                **options, "ALONE": alone, "BLOCK": long.tile, "VECTOR": long.vector, "PARTS": long.parts,
                "STAGES": long.tile_stages,
            }  # fmt: skip
            yield _kernel(f"topk pass {title}", kp.pass_kernel, blocks, long.tile_warps, 120, s_ptr=pointer)
            chooses = k <= plan.MAX_SORTED
            blocks = {
                **options, "SHIFT": shift, "CHOOSE": chooses, "BLOCK": long.capacity if chooses else 1,
                "TILE": long.alone,
            }  # fmt: skip
            yield _kernel(
                f"topk choose {title}", kp.choose_kernel, blocks, long.choose_warps, 255, wide=False,
                spill=144 if alone else 88, limit=long.choose_registers, amd=139 if alone else 0, s_ptr=pointer,
            )  # fmt: skip
    for dtype, n_rows, k, best_first, in_order, registers in (
        ("fp32", 64, 64, True, False, 96), ("fp32", 64, 64, False, False, 96), ("fp32", 64, 2048, True, False, 80),
        ("fp32", 64, 2048, False, False, 80), ("fp32", 8192, 2048, True, True, 128),
        ("bf16", 8192, 2048, True, True, 208), ("fp32", 4096, 2048, False, False, 128),
    ):  # fmt: skip
        block_r, block_k, warps, limit = plan.of_sort(n_rows, k, 4 if dtype == "bf16" else 8, 132)
        blocks = {
            "y_ptr": None, "SORTED": best_first, "LARGEST": True, "BLOCK_R": block_r, "BLOCK_K": block_k,
            "WARPS": warps, **({"state_ptr": None} if in_order else {}),
        }  # fmt: skip
        for_all = {"s_ptr": f"*{dtype}", "value_ptr": f"*{dtype}", "gate_ptr": f"*{dtype}"}
        for_all |= {"packed_ptr": "*i32"} if dtype == "bf16" else {}
        title = f"topk sort {dtype} {n_rows} {k}" + ("" if best_first else " by column")
        # rows of 64: 8 bytes
        yield _kernel(
            title, ks.sort_kernel, blocks, warps, registers, wide=False, spill=8 if k == 64 else 0, limit=limit,
            **for_all,
        )  # fmt: skip
    yield _kernel("topk runs", ks.run_kernel, {"BY_SCORE": True, "BLOCK": plan.RUN}, 16, 64, wide=False)
    blocks = {"BY_SCORE": True, "FETCH": True, "LARGEST": True, "WAYS": plan.WAYS, "BLOCK": plan.MERGED}
    yield _kernel("topk merge", ks.merge_kernel, blocks, 4, 120, wide=False)
    yield _kernel("topk backward", kb.add_kernel, {"BLOCK": kb.BLOCK}, 4, 64, wide=False)


KERNELS = list(_kernels())
