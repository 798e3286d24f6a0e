"""Budgets of the kernels between the matrix products of routed layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from codegen.kernel import Kernel, i32, kernel, pointers

__all__ = ["KERNELS"]


# (dtype of x, width, "scores" with or without a mask, or chosen "rows") → forward: BLOCK_C, warps, registers;
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
    ("fp32", 1024, "two scores, residual"): (256, 2, 64, 1, 1024, 4, 3, 128),
    ("bf16", 1024, "masked scores"): (512, 2, 56, 1, 1024, 4, 3, 128),
}


def _norm() -> Iterator[Kernel]:
    for (t, d, what), (cols, warps, registers, rows, b_cols, b_warps, stages, more) in _NORM.items():
        common = {"x_ptr": f"*{t}", "w_ptr": "*fp32", "stats_ptr": "*fp32"}
        common |= i32("x_batch_stride", "x_row_stride", "n", "m", "total")
        scored, masked = "scores" in what, "masked" in what
        shape: dict[str, Any] = {"D": d, "VEC": 8, "R": scored + ("two" in what)}
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
            f"routing norm {t} D={d} {what}", kernel("fused.kernels_norm", "forward_kernel"), signature,
            shape | {"BLOCK_R": 1, "BLOCK_C": cols}, pointers(signature), num_warps=warps, max_registers=registers,
        )  # fmt: skip
        signature = common | {"dy_ptr": "*bf16", "dx_ptr": f"*{t}", "partials_ptr": "*fp32"}
        signature |= i32("stride", "n_explore", "partials_stride")
        if "residual" in what:
            signature |= {"residual_ptr": "*fp32"}
        else:
            shape |= {"residual_ptr": None}
        if scored:
            signature |= {"ds_ptr": "*fp32", "explore_grad_ptr": "*fp32"}
        else:
            shape |= {"ds_ptr": None, "explore_grad_ptr": None}
        yield Kernel(
            f"routing norm backward {t} D={d} {what}", kernel("fused.kernels_norm", "backward_kernel"), signature,
            shape | {"BLOCK_R": rows, "BLOCK_C": b_cols, "STAGES": stages}, pointers(signature), num_warps=b_warps,
            max_registers=more,
        )  # fmt: skip


# dtype → BLOCK_R, BLOCK_C, registers of the sums, registers of GELU's gradient
_BRANCH = {"bf16": (2, 1024, 80, 80), "fp32": (2, 512, 64, 64)}


def _branch() -> Iterator[Kernel]:
    for t, (block_r, block_c, sums, gelu) in _BRANCH.items():
        shape = {"D": 1024, "OFFSET": 512, "BLOCK_R": block_r, "BLOCK_C": block_c}
        common = {"partials_ptr": "*fp32", **i32("total", "partials_stride")}
        signature = common | {"x_ptr": f"*{t}"}
        for name, copy in (("", None), (" and copy", "*bf16")):
            if copy is None or t == "fp32":
                yield Kernel(
                    f"routing column sums{name} {t}", kernel("fused.kernels_branch", "sums_kernel"),
                    signature | ({} if copy is None else {"copy_ptr": copy}),
                    shape | {"UNROLL": 4} | ({"copy_ptr": None} if copy is None else {}),
                    pointers(signature), num_warps=8, max_registers=sums,
                )  # fmt: skip
        signature = common | {"dh_ptr": f"*{t}", "u_ptr": f"*{t}"}
        yield Kernel(
            f"routing gelu backward {t}", kernel("fused.kernels_branch", "gelu_backward_kernel"), signature,
            shape | {"UNROLL": 4}, pointers(signature), num_warps=8, max_registers=gelu,
        )  # fmt: skip
        signature = {"x_ptr": "*fp32", "y_ptr": f"*{t}", "out_ptr": "*fp32", **i32("total")}
        yield Kernel(
            f"routing residual {t}", kernel("fused.kernels_branch", "residual_kernel"), signature,
            {"UNIT": 16, "BLOCK": 1024}, pointers(signature), max_registers=40,
        )  # fmt: skip
        signature = {"dy_ptr": f"*{t}", "length_ptr": "*fp32", **i32("n", "stride", "count", "total")}
        yield Kernel(
            f"routing explore {t}", kernel("fused.kernels_explore", "length_kernel"), signature,
            {"D": 1024, "BLOCK_R": 4, "BLOCK_C": 1024}, pointers(signature), max_registers=64,
        )  # fmt: skip
    tensors = [f"{side}{i}" for side in "ab" for i in range(8)]
    signature = {name: "*fp32" if name[0] == "a" else "*bf16" for name in tensors} | i32(*(f"n{i}" for i in range(8)))
    yield Kernel(
        "routing cast", kernel("fused.kernels_cast", "cast_kernel"), signature,
        {"UNIT": 16, "BLOCK": 4096}, pointers(signature),
        max_registers=64,
    )  # fmt: skip
    signature = {
        "length_ptr": "*fp32",
        "mask_ptr": "*u8",
        "explore_grad_ptr": "*fp32",
        **i32("stride", "count", "mask_stride"),
    }
    yield Kernel(
        "routing explore, centred", kernel("fused.kernels_explore", "centre_kernel"), signature | {"scale": "fp32"},
        {"BLOCK": 1024}, pointers(signature), max_registers=64, vector_loads=False,
    )  # fmt: skip


def _attention() -> Iterator[Kernel]:
    """Gates on the values of 8 heads of 64, half of a packed projection, and places of keys chosen per window."""
    for t in ("bf16", "fp32"):
        common = {"v_ptr": f"*{t}", "g_ptr": "*fp32", **i32("v_stride", "total")}
        shape = {"D": 512, "VEC": 8, "BLOCK_R": 8, "BLOCK_C": 512}
        for name, more in (("gate", {"out_ptr": f"*{t}"}), ("gate_backward", {"dv_ptr": f"*{t}", "dg_ptr": "*fp32"})):
            signature = common | more | (i32("dv_stride") if "dv_ptr" in more else {})
            yield Kernel(
                f"attention {name.replace('_', ' ')} {t}", kernel("fused.kernels_attention", f"{name}_kernel"),
                signature, shape, pointers(signature), max_registers=96,
            )  # fmt: skip
    signature = {"within_ptr": "*i64", "query_ptr": "*i64", "at_ptr": "*i64", "seen_ptr": "*i32"}
    signature |= i32("per_window", "windows", "window", "n_places", "n_queries")
    yield Kernel(
        "attention places", kernel("fused.kernels_attention", "place_kernel"), signature, {"BLOCK": 256},
        pointers(signature), max_registers=64, vector_loads=False,
    )  # fmt: skip


def _counts() -> Iterator[Kernel]:
    signature = {"mask_ptr": "*u8", "count_ptr": "*fp32", **i32("mask_row_stride", "n", "numerator", "denominator")}
    yield Kernel(
        "routing counts", kernel("fused.kernels_counts", "count_kernel"), signature, {"BLOCK": 1024},
        pointers(signature), max_registers=64, vector_loads=False,
    )  # fmt: skip
    for hard in (False, True):
        signature = {"index_ptr": "*i64", "gate_ptr": "*fp32", "count_ptr": "*fp32"}
        signature |= {} if hard else {"soft_ptr": "*fp32"}
        signature |= i32("soft_row_stride", "k", "total")
        yield Kernel(
            f"routing cut{', gates of 1' * hard}", kernel("fused.kernels_counts", "cut_kernel"), signature,
            {"BLOCK": 256, **({"soft_ptr": None} if hard else {})}, pointers(signature), max_registers=64,
            vector_loads=False,
        )  # fmt: skip


def _decoding() -> Iterator[Kernel]:
    """A token of 8 sequences through a block of width 1024 with 16 heads of 64, windows of 256."""
    t, source = "*bf16", "fused.kernels_decoding"
    names = ("x", "v", "light", "heavy", "tokens", "to_light", "to_heavy")
    signature = {f"{name}_ptr": t for name in names} | {f"{name}_ptr": "*i64" for name in ("position", "taken")}
    signature |= {f"{name}_ptr": "*fp32" for name in ("scores", "threshold", "gates")}
    floats = dict.fromkeys(("light_eps", "heavy_eps", "score_eps", "eps"), "fp32")
    yield Kernel(
        "decoding choose", kernel(source, "choose_kernel"), signature | i32("numerator", "denominator") | floats,
        {"D": 1024, "BLOCK": 256, "MEMORY": 2048, "WINDOW": 256, "BLOCK_C": 1024}, pointers(signature),
        max_registers=64,
    )  # fmt: skip
    signature = {"x_ptr": t, "v_ptr": t, "scores_ptr": "*fp32"}
    yield Kernel(
        "decoding score", kernel(source, "score_kernel"), signature | {"eps": "fp32"}, {"D": 1024, "BLOCK_C": 1024},
        pointers(signature), max_registers=64,
    )  # fmt: skip
    rows = {"ROWS": 8, "BLOCK_B": 16, "BLOCK_N": 16, "BLOCK_K": 256}
    signature = {f"{h}{name}_ptr": t for h in ("", "heavy_") for name in ("x", "w", "bias", "y")}
    signature |= {"gates_ptr": "*fp32"}
    yield Kernel(
        "decoding both", kernel(source, "both_kernel"), signature,
        rows | {"GELU": True, "N": 512, "N_HEAVY": 4096, "K": 1024}, pointers(signature),
    )  # fmt: skip
    signature = {f"{h}{name}_ptr": t for h in ("", "heavy_") for name in ("x", "w")}
    signature |= {"gates_ptr": "*fp32", "null_ptr": t, "residual_ptr": t, "y_ptr": t}
    yield Kernel(
        "decoding sum", kernel(source, "sum_kernel"), signature,
        rows | {"N": 1024, "K": 1024, "K_HEAVY": 1024, "bias_ptr": None, "heavy_bias_ptr": None}, pointers(signature),
    )  # fmt: skip
    heads = {"HEADS": 16, "HALF": 32, "BLOCK_H": 32}
    floats = dict.fromkeys(("scale", "log2_base_high", "log2_base_low"), "fp32")
    signature = {f"{name}_ptr": t for name in ("qkv", "keys", "values", "out")} | {"position_ptr": "*i64"}
    weights = {f"{name}_weight_ptr": "*fp32" for name in "qk"}
    parts = {f"{name}_ptr": "*fp32" for name in ("sums", "weights", "tops")}
    near, eps = kernel(source, "near_kernel"), {"eps": "fp32"}
    yield Kernel(
        "decoding near, windows", near, signature | floats | eps,
        heads | dict.fromkeys(weights | parts) | {"WINDOW": 256, "PLACES": 512, "PARTS": 1, "BLOCK_N": 256},
        pointers(signature), num_warps=8, max_registers=168, max_spill_bytes=32,
    )  # fmt: skip
    yield Kernel(
        "decoding near, all", near, signature | weights | parts | floats | eps,
        heads | {"WINDOW": 0, "PLACES": 65536, "PARTS": 64, "BLOCK_N": 128}, pointers(signature | weights | parts),
        max_registers=168, max_spill_bytes=32,
    )  # fmt: skip
    partial = {f"{name}_ptr": "*fp32" for name in ("sums", "weights", "tops", "gates")}
    signature = {f"{name}_ptr": t for name in ("q", "keys", "values")} | {"position_ptr": "*i64"} | partial
    yield Kernel(
        "decoding far", kernel(source, "far_kernel"), signature | floats,
        heads | {"WINDOW": 256, "QUOTA": 32, "PLACES": 8192, "PARTS": 16, "BLOCK_N": 128}, pointers(signature),
        max_registers=168, max_spill_bytes=32,
    )  # fmt: skip
    signature = partial | {"out_ptr": t}
    yield Kernel(
        "decoding merge", kernel(source, "merge_kernel"), signature, heads | {"PARTS": 16, "BLOCK_P": 16},
        pointers(signature), num_warps=2, max_registers=64,
    )  # fmt: skip


KERNELS = [*_norm(), *_branch(), *_attention(), *_counts(), *_decoding()]
