"""Register budgets of the experts' kernels, at the sizes of a usual model: 64 experts, 4 a token, dim 1024."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.kernel import Kernel, i32, kernel, pointers

_NAMES = ("rows", "choice", "products", "few")
_ROWS, _CHOICE, _PRODUCTS, _FEW = (f"ops.experts.kernels_{name}" for name in _NAMES)
_SIZES = i32("n", "n_experts")


def _order() -> Iterator[Kernel]:
    ids = {"id_ptr": "*i64", "count_ptr": "*i32"}
    places = {"total_ptr": "*i32", "place_ptr": "*i32", "row_ptr": "*i32", "end_ptr": "*i32"}
    shape = {"CHUNK": 128, "WIDTH": 64}
    for name, signature, constants, registers in (
        ("count", ids | _SIZES, shape, 40),
        ("scan", {"count_ptr": "*i32", "total_ptr": "*i32", **i32("n_chunks")}, {"STEP": 1024, "WIDTH": 64}, 64),
        ("place", ids | places | _SIZES, shape, 168),
    ):
        yield Kernel(
            f"experts {name}", kernel(_ROWS, f"{name}_kernel"), signature, constants, pointers(signature),
            max_registers=registers, vector_loads=False,
        )  # fmt: skip


def _rows(t: str) -> Iterator[Kernel]:
    wide = t == "fp32"
    tile = {"D": 1024, "BLOCK_R": 4, "BLOCK_C": 512}
    signature = {"x_ptr": f"*{t}", "place_ptr": "*i32", "out_ptr": f"*{t}", **i32("row_stride")}
    yield Kernel(
        f"experts spread {t}", kernel(_ROWS, "spread_kernel"), signature | _SIZES, tile | {"K": 4, "VEC": 8},
        pointers(signature), max_registers=56,
    )  # fmt: skip
    signature = {"row_ptr": f"*{t}", "place_ptr": "*i32", "end_ptr": "*i32", "y_ptr": f"*{t}"}
    yield Kernel(
        f"experts gather-sum {t}", kernel(_ROWS, "gather_sum_kernel"), signature | _SIZES,
        tile | {"K": 4, "more_ptr": None}, pointers(signature), max_registers=96 if wide else 72,
    )  # fmt: skip
    common = {"h_ptr": f"*{t}", "weight_ptr": "*fp32", "row_ptr": "*i32", "end_ptr": "*i32", "a_ptr": f"*{t}"}
    more = {"d_ptr": f"*{t}", "d_weight_ptr": "*fp32"}
    for gated in (False, True):
        linear = {"linear_ptr": f"*{t}"} if gated else {}
        absent = {} if gated else {"linear_ptr": None}
        name = "swiglu" if gated else "gelu"
        yield Kernel(
            f"experts {name} {t}", kernel(_ROWS, "activate_kernel"), common | linear | _SIZES, tile | absent,
            pointers(common | linear), max_registers=72,
        )  # fmt: skip
        linear |= {"d_linear_ptr": f"*{t}"} if gated else {}
        absent |= {} if gated else {"d_linear_ptr": None}
        yield Kernel(
            f"experts {name} backward {t}", kernel(_ROWS, "activate_backward_kernel"), common | more | linear | _SIZES,
            tile | absent, pointers(common | more | linear), max_registers=128 if wide else 104,
        )  # fmt: skip


def _choice() -> Iterator[Kernel]:
    signature = {"w_ptr": "*fp32", "out_ptr": "*bf16", **i32("size")}
    yield Kernel(
        "experts parts", kernel(_CHOICE, "parts_kernel"), signature, {"THREE": True, "BLOCK": 1024},
        pointers(signature), max_registers=40, vector_loads=False,
    )  # fmt: skip
    tile = {"K": 4, "NORM": True, "BLOCK_R": 8, "BLOCK_C": 64}
    signature = dict.fromkeys(("part_ptr", "bias_ptr", "logit_ptr", "weight_ptr"), "*fp32")
    signature |= {"mask_ptr": "*u8", "index_ptr": "*i64", "count_ptr": "*i32"}
    for softmax in (False, True):
        yield Kernel(
            f"experts choose softmax={softmax}", kernel(_CHOICE, "choose_kernel"), signature | _SIZES,
            tile | {"PARTS": 3, "SOFTMAX": softmax, "BLOCK_K": 4}, pointers(signature), num_warps=2,
            max_registers=168, vector_loads=False,
        )  # fmt: skip
    signature = dict.fromkeys(("logit_ptr", "weight_ptr", "d_weight_ptr", "more_ptr"), "*fp32")
    signature |= {"index_ptr": "*i64", "out_ptr": "*bf16"}
    yield Kernel(
        "experts choose backward", kernel(_CHOICE, "choose_backward_kernel"), signature | _SIZES,
        tile | {"SOFTMAX": True, "IN_PARTS": True}, pointers(signature), num_warps=2, max_registers=168,
        vector_loads=False,
    )  # fmt: skip


def _products(t: str) -> Iterator[Kernel]:
    common = {"a_ptr": f"*{t}", "b_ptr": f"*{t}", "end_ptr": "*i32", "out_ptr": f"*{t}"}
    signature = common | i32("b_expert", "b_row", "D", "M", "E")
    size, depth = (64, 32) if t == "fp32" else (128, 64)
    block = {"BLOCK": size, "BLOCK_D": depth}
    yield Kernel(
        f"experts product {t}", kernel(_PRODUCTS, "rows_kernel"), signature,
        {"b_col": 1, "WIDTH": 64, **block}, (*pointers(common), "b_row", "D", "M"), num_warps=4 if t == "fp32" else 8,
        max_registers=216, vector_loads=False,
    )  # fmt: skip
    yield Kernel(
        f"experts weight product {t}", kernel(_PRODUCTS, "weights_kernel"), common | i32("P", "Q"),
        {"BLOCK_N": 32, "BLOCK": 64}, (*pointers(common), "P", "Q"), max_registers=200,
        vector_loads=False,
    )  # fmt: skip


def _few(t: str) -> Iterator[Kernel]:
    strides, tile = i32("expert_stride", "row_stride"), {"D": 1024, "H": 2048, "VEC": 8, "DEEP": 256, "WIDE": 32}
    gate = i32("gate_expert_stride", "gate_row_stride")
    tensors = {"x_ptr": f"*{t}", "id_ptr": "*i64", "up_ptr": f"*{t}", "gate_ptr": f"*{t}", "part_ptr": "*fp32"}
    yield Kernel(
        f"experts few, hidden {t}", kernel(_FEW, "hidden_kernel"), tensors | _SIZES | strides | gate, tile | {"K": 2},
        pointers(tensors), max_registers=96,
    )  # fmt: skip
    tensors = {"part_ptr": "*fp32", "id_ptr": "*i64", "weight_ptr": "*fp32", "down_ptr": f"*{t}", "out_ptr": "*fp32"}
    yield Kernel(
        f"experts few, out {t}", kernel(_FEW, "out_kernel"), tensors | _SIZES | strides | i32("n_parts"),
        tile | {"GATED": True, "PARTS": 4}, pointers(tensors), max_registers=96,
    )  # fmt: skip
    tensors = {"part_ptr": "*fp32", "y_ptr": f"*{t}"}
    yield Kernel(
        f"experts few, sum {t}", kernel(_FEW, "sum_kernel"), tensors | i32("n_parts"),
        {"D": 1024, "PARTS": 16, "WIDE": 32}, pointers(tensors), max_registers=80,
    )  # fmt: skip


KERNELS = [
    *_order(), *_choice(), *(k for t in ("bf16", "fp32") for k in (*_rows(t), *_few(t))),
    *(k for t in ("fp16", "fp32") for k in _products(t)),
]  # fmt: skip
