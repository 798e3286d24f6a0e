"""Budgets of the kernels of Lion."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.kernel import Kernel, kernel
from onepass.ops.lion.table import shape_of

_EVERY_VARIANT = ("fp32", "bf16", "bf16 + remainder", "bf16, int8 momentum")


# registers where two widths meet in one tile
_MIXED = {
    "fp32, bf16 momentum": 80, "fp32, bf16 gradient": 96, "bf16, fp32 momentum": 80,
    "bf16 + remainder, fp32 momentum": 120, "fp32, int8 momentum": 112,
}  # fmt: skip


def _kernels() -> Iterator[Kernel]:
    signature = {
        "table_ptr": "*i64", "scale_ptr": "*fp32", "clip_ptr": "*fp32", "found_inf_ptr": "*fp32", "agreed_ptr": "*i64",
        "n_tensors": "i32", "n_groups": "i32",
    }  # fmt: skip
    types = (
        # mode, parameter, gradient, momentum, extra
        ("fp32", 0, "fp32", "fp32", "fp32", "fp32"),
        ("bf16", 0, "bf16", "bf16", "bf16", "bf16"),
        ("fp16", 0, "fp16", "fp16", "fp16", "fp16"),
        ("fp32, bf16 momentum", 0, "fp32", "fp32", "bf16", "fp32"),
        ("fp32, bf16 gradient", 0, "fp32", "bf16", "fp32", "fp32"),
        ("bf16, fp32 momentum", 0, "bf16", "bf16", "fp32", "bf16"),
        ("bf16 + remainder", 1, "i16", "bf16", "bf16", "i16"),
        ("bf16 + remainder, fp32 momentum", 1, "i16", "bf16", "fp32", "i16"),
        ("fp32, int8 momentum", 0, "fp32", "fp32", "i8", "fp32"),
        ("bf16, int8 momentum", 0, "bf16", "bf16", "i8", "bf16"),
        ("bf16 + remainder, int8 momentum", 1, "i16", "bf16", "i8", "i16"),
    )
    variants = ((True, False, False), (False, False, False), (True, True, False), (True, True, True))
    for name, mode, p, g, m, e in types:
        for aligned, cautious, count in variants:
            # compile rare variants for a few storages only, which keeps the gate quick: the others share their code
            if not (aligned and not cautious) and name not in _EVERY_VARIANT:
                continue
            words = [name, *(["cautious"] * cautious), *(["count"] * count), *(["unaligned"] * (not aligned))]
            shape = shape_of(p, m)
            # only int8 codes use NVIDIA's assembly; other GPUs use plain Triton
            for ptx in (True, False) if m == "i8" else (False,):
                budget = 80 if m == "i8" else 72 if cautious or mode == 1 else 64
                budget = _MIXED.get(name, budget) if aligned and not cautious else budget
                yield Kernel(
                    f"lion {', '.join(words)}{', no PTX' if m == 'i8' and not ptx else ''}",
                    kernel("ops.lion.kernels", "step_kernel"), signature,
                    {
                        "P_TYPE": p, "G_TYPE": g, "M_TYPE": m, "E_TYPE": e, "MODE": mode, "ALIGNED": aligned,
                        "CAUTIOUS": cautious, "CAUTIOUS_DECAY": cautious, "COUNT": count, "HAS_SCALE": True,
                        "HAS_CLIP": True, "HAS_FOUND_INF": True, "STREAM": shape.stream, "SPAN": 32,
                        "BLOCK": shape.block, "TILES": shape.tiles, "PTX": ptx,
                    },
                    divisible=("table_ptr", "scale_ptr", "clip_ptr", "found_inf_ptr", "agreed_ptr"),
                    num_warps=shape.num_warps, vector_loads=aligned,
                    max_registers=budget if aligned and (ptx or m != "i8") else 144,
                    amd=not ptx,
                )  # fmt: skip
    for g in ("fp32", "bf16", "fp16"):
        yield Kernel(
            f"gradient norm {g}", kernel("ops.lion.kernels", "norm_kernel"),
            {
                "table_ptr": "*i64", "before_ptr": "*fp32", "partial_ptr": "*fp32", "ticket_ptr": "*i32",
                "out_ptr": "*fp32", "max_norm_ptr": "*fp32", "scale_ptr": "*fp32", "n_tensors": "i32",
                "n_groups": "i32", "n_chunks": "i32",
            },
            {
                "G_TYPE": g, "ALIGNED": True, "HAS_BEFORE": True, "HAS_SCALE": True, "SPAN": 32, "CHUNK": 4096,
                "BLOCK": 2048, "PROGRAMS": 1056,
            },
            divisible=("table_ptr", "partial_ptr"), num_warps=8, max_registers=64,
        )  # fmt: skip


KERNELS = list(_kernels())
