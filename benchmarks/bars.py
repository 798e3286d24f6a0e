"""The bars that an H200 run is held against: asked, and the worst cell measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.bench.runner import OURS, is_rival, label

Record = Mapping[str, Any]
# variants of ours, which are no rivals
FORWARD, ONE_VECTOR = f"{OURS}, forward", f"{OURS}, one vector"


class Row(NamedTuple):
    """All implementations of one case."""

    op: str
    stage: str
    dtype: str
    case: Mapping[str, Any]
    impls: Mapping[str, Record]


class Bar(NamedTuple):
    """One promise: what is measured at which cases, and how much is asked (at most, if `most`)."""

    words: str
    op: str
    stage: str
    asked: float
    measure: Callable[[Row], float | None]
    unit: str
    where: Callable[[Row], bool] = lambda row: True
    most: bool = False


def rows(records: Iterable[Record]) -> list[Row]:
    """Group records by case."""
    found: dict[tuple[str, ...], Row] = {}
    for r in records:
        key = (str(r["op"]), str(r["pass"]), str(r["dtype"]), label(r["case"]))
        row = found.setdefault(key, Row(*key[:3], r["case"], {}))
        row.impls[r["impl"]] = r  # type: ignore[index]
    for (op, stage, dtype, case), row in found.items():
        # what some bars compare a case with: the forward pass of a backward pass, the same sums with one vector
        single = label({k: v for k, v in row.case.items() if k != "vectors"})
        for name, key in ((FORWARD, (op, "forward", dtype, case)), (ONE_VECTOR, (op, stage, dtype, single))):
            other = found.get(key, row)
            if other is not row and OURS in other.impls:
                row.impls[name] = other.impls[OURS]  # type: ignore[index]
    return list(found.values())


def _share(row: Row) -> float | None:
    return float(row.impls[OURS]["copy_pct"]) if OURS in row.impls else None


def _host(row: Row) -> float | None:
    return row.impls[OURS]["host_us"] if OURS in row.impls else None


def _both_hosts(row: Row) -> float | None:
    """Host time of a backward pass and of the forward pass before it."""
    times = [row.impls[impl]["host_us"] for impl in (FORWARD, OURS) if impl in row.impls]
    return sum(times) if len(times) == 2 and None not in times else None


def _over(impl: str) -> Callable[[Row], float | None]:
    """How many times longer we take than this variant of ours."""
    return lambda row: row.impls[OURS]["us"] / row.impls[impl]["us"] if {OURS, impl} <= set(row.impls) else None


def _ms(row: Row) -> float | None:
    return float(row.impls[OURS]["us"]) / 1e3 if OURS in row.impls else None


def _peak(row: Row) -> float | None:
    return row.impls[OURS].get("peak_mib") if OURS in row.impls else None


def _of_allowed(row: Row) -> float:
    """Our time over what torch's operator takes, 5 % and 5 µs."""
    return float(row.impls[OURS]["us"]) / (1.05 * float(row.impls["torch"]["us"]) + 5)


def _us(impl: str) -> Callable[[Row], float | None]:
    return lambda row: float(row.impls[impl]["us"]) if impl in row.impls else None


def _against(*names: str) -> Callable[[Row], float | None]:
    """How many times longer the fastest rival takes, of those whose names contain one of these (none given: of all)."""

    def times(row: Row) -> float | None:
        rivals = [
            float(r["us"])
            for impl, r in row.impls.items()
            if is_rival(impl) and (not names or any(n in impl for n in names))
        ]
        return min(rivals) / float(row.impls[OURS]["us"]) if rivals and OURS in row.impls else None

    return times


def _cols(least: int, most: float = float("inf"), dtype: str = "", **case: Any) -> Callable[[Row], bool]:
    return lambda row: (
        least <= row.case.get("cols", -1) <= most
        and dtype in row.dtype
        and all(row.case.get(k) == v for k, v in case.items())
    )


def _norms() -> list[Bar]:
    found = []
    for op in ("layer_norm", "rms_norm"):
        for low, high, dtype, asked, stage in (
            (4096, 16384, "", 92, "forward"), (128, 1024, "", 85, "forward"), (32768, 32768, "", 85, "forward"),
            (32769, 1 << 30, "", 75, "forward"),
            (4096, 16384, "float32", 90, "backward"), (128, 1024, "float32", 82, "backward"),
            (4096, 8192, "bfloat16", 85, "backward"), (128, 1024, "bfloat16", 68, "backward"),
            (16384, 32768, "bfloat16", 62, "backward"), (32769, 1 << 30, "", 55, "backward"),
        ):  # fmt: skip
            width = f"{low} wide" if low == high else f"above {low - 1}" if high == 1 << 30 else f"{low} to {high} wide"
            where = _cols(low, high, dtype, residual=None)
            found.append(Bar(f"{width} {dtype}".rstrip(), op, stage, asked, _share, "% of copy", where))
        plain = _cols(0, residual=None)
        for stage in ("forward", "backward"):
            found.append(Bar("fastest rival", op, stage, 1.0, _against(), "×", plain))
        found.append(Bar("host time", op, "forward", 25, _host, "µs", plain, most=True))
        found.append(Bar("host time, forward + backward", op, "backward", 80, _both_hosts, "µs", plain, most=True))
    fused = _cols(0, residual=True)
    for stage in ("forward", "backward"):
        found.append(Bar("residual, against add then norm", "rms_norm", stage, 1.3, _against("add, then"), "×", fused))
    return found


def _weighted_sums() -> list[Bar]:
    single = _cols(0, vectors=None)
    return [
        Bar("from 512 wide", "weighted_sum", "forward", 90, _share, "% of copy", _cols(512, vectors=None)),
        Bar("64 wide", "weighted_sum", "forward", 80, _share, "% of copy", _cols(64, 64, vectors=None)),
        Bar("from 512 wide float32", "weighted_sum", "backward", 93, _share, "% of copy", _cols(512, dtype="float32")),
        Bar("from 4096 bfloat16", "weighted_sum", "backward", 85, _share, "% of copy", _cols(4096, dtype="bfloat16")),
        Bar("fastest rival", "weighted_sum", "forward", 1.0, _against(), "×", single),
        Bar("fastest rival", "weighted_sum", "backward", 1.0, _against(), "×", single),
        Bar("host time", "weighted_sum", "forward", 25, _host, "µs", most=True),
        Bar("host time, forward + backward", "weighted_sum", "backward", 80, _both_hosts, "µs", most=True),
        Bar(
            "4 vectors, one", "weighted_sum", "forward", 1.15, _over(ONE_VECTOR), "×", _cols(512, vectors=4), most=True
        ),
    ]


def _soft_topks() -> list[Bar]:
    found = []
    for schedule, n_rows, cols, *both in (
        ("T=50 eps=0.1", 4096, 1024, 5, 15), ("T=50 eps=0.1", 1024, 8192, 8, 20), ("T=50 eps=0.1", 256, 32768, 5, 100),
        ("T=20 eps=4→0.03", 4096, 1024, 5, 10), ("T=20 eps=4→0.03", 1024, 8192, 5, 12),
        ("T=20 eps=4→0.03", 256, 32768, 5, 50),
    ):  # fmt: skip
        where = _cols(cols, cols, rows=n_rows, schedule=schedule)
        words = f"{n_rows}×{cols} {schedule}, the public Triton kernel"
        for stage, times in zip(("forward", "backward"), both, strict=True):
            found.append(Bar(words, "coor_descent", stage, times, _against("colt5 triton"), "×", where))
    for stage, asked in (("forward", 2), ("backward", 4)):
        found.append(Bar("torch.compile", "coor_descent", stage, asked, _against("compile"), "×"))
    square = {"rows": 8192, "kind": "capped_exp"}
    for eps, asked in ((0.1, 55), (0.03, 55), (1.0, 80)):
        where = _cols(8192, 8192, "float32", eps=eps, **square)
        found.append(Bar(f"8192×8192 eps={eps}", "soft_topk", "forward", asked, _share, "% of copy", where))
    found += [
        Bar("8192×8192, other kinds", "soft_topk", "forward", 35, _share, "% of copy", _other_kind),
        Bar("8192×8192", "soft_topk", "backward", 90, _share, "% of copy", _cols(8192, 8192, "float32", rows=8192)),
    ]
    graph = _us("onepass, CUDA graph")
    for stage, most in (("forward", 120), ("backward", 60)):
        found.append(Bar("2×1048576, CUDA graph", "soft_topk", stage, most, graph, "µs", _cols(1 << 20, rows=2), True))
        found.append(Bar("entmax, LapSum, SOFT", "soft_topk", stage, 1.0, _against("entmax", "LapSum", "SOFT"), "×"))
    apart = _against("torch.topk + soft_topk")
    found.append(Bar("64×32768, torch.topk + soft_topk", "topk", "forward", 1.0, apart, "×", _cols(32768, rows=64)))
    found.append(Bar("torch.topk, which makes no gates", "topk", "forward", 1.3, _against("without gates"), "×"))
    return found


def _other_kind(row: Row) -> bool:
    return _cols(8192, 8192, "float32", rows=8192)(row) and row.case.get("kind") != "capped_exp"


def _lions() -> list[Bar]:
    found = []
    for words, asked, given in (
        ("llama-1b", 95, {"model": "llama-1b", "low_precision": "none"}),
        ("llama-1b remainder", 90, {"model": "llama-1b", "low_precision": "remainder"}),
        ("llama-1b int8 momentum", 82, {"model": "llama-1b", "momentum": "int8"}),
        ("gpt2-124m", 88, {"model": "gpt2-124m", "low_precision": "none"}),
    ):
        found.append(Bar(words, "lion", "step", asked, _share, "% of its floor", _of_model(given)))
    large = _of_model({"model": "llama-1b", "low_precision": "none"})
    small = _of_model({"model": "1000 small tensors", "low_precision": "none"})
    return [
        *found,
        Bar("llama-1b, fastest rival", "lion", "step", 1.0, _against(), "×", large),
        Bar("1000 small tensors", "lion", "step", 300, _us(OURS), "µs", small, most=True),
        Bar("1000 small tensors, fused AdamW", "lion", "step", 8, _against("AdamW"), "×", small),
    ]


def _of_model(given: Mapping[str, Any]) -> Callable[[Row], bool]:
    """Cases with these entries and no other variant (a momentum of its own, cautious, clipping) than they name."""
    others = {"momentum", "cautious", "clip"} - set(given)
    return lambda row: all(row.case.get(k) == v for k, v in given.items()) and not others & set(row.case)


def _routing() -> list[Bar]:
    both = "forward+backward"
    large, small = _of_size(dim=1024, n=32768), _of_size(dim=512, n=8192)
    short = _of_size(dim=1024, n=8192)
    found = [
        Bar("d=1024, 2×32768, dense", "routed_feed_forward", both, 2.0, _against("dense"), "×", large),
        Bar("d=1024, 2×32768, light + dense/16", "routed_feed_forward", both, 1.25, _of_parts, "×", large, most=True),
        Bar("d=1024, 2×8192, dense", "routed_feed_forward", both, 1.0, _against("dense"), "×", short),
        Bar("d=512, 2×8192, dense", "routed_feed_forward", both, 1.0, _against("dense"), "×", small),
        Bar("d=1024, 2×32768, dense flash", "routed_block", both, 5.0, _against("dense"), "×", large),
        Bar("d=1024, 2×8192, dense flash", "routed_block", both, 1.3, _against("dense"), "×", short),
        Bar("d=1024, 2×32768, memory of dense", "routed_block", both, 0.6, _memory("dense"), "×", large, most=True),
        Bar("64 MB and more", "gather, gated add", "forward", 55, _share, "% of copy", _moves_64_mb),
    ]
    for words, asked, where in (
        ("d=1024, 2×32768", 2.0, large), ("d=1024, 2×8192", 2.7, short), ("d=512, 2×8192", 1.0, small),
    ):  # fmt: skip
        found.append(Bar(f"{words}, dense, both CUDA graphs", "routed_feed_forward", both, asked, _graphs, "×", where))
    for op in ("routed_feed_forward", "routed_block"):
        found.append(Bar("colt5-attention, fp32", op, both, 3.0, _against("colt5"), "×"))
        found.append(Bar("colt5-attention, fp32, memory", op, both, 1.0, _memory("colt5"), "×", most=True))
    return found


def _graphs(row: Row) -> float | None:
    """How many times longer the dense module takes, when both are replayed from a CUDA graph."""
    names = [f"{impl}, CUDA graph" for impl in ("dense", OURS)]
    return float(row.impls[names[0]]["us"]) / float(row.impls[names[1]]["us"]) if set(names) <= set(row.impls) else None


def _of_parts(row: Row) -> float | None:
    """Our time over that of the light branch alone and a sixteenth of the dense layer."""
    us = {impl: float(r["us"]) for impl, r in row.impls.items()}
    light = next((t for impl, t in us.items() if "light" in impl), None)
    if light is None or not {OURS, "dense"} <= set(us):
        return None
    return us[OURS] / (light + us["dense"] / 16)


def _memory(name: str) -> Callable[[Row], float | None]:
    """Our peak memory over the smallest of the rivals whose names contain this."""

    def share(row: Row) -> float | None:
        peaks = {impl: r.get("peak_mib") for impl, r in row.impls.items()}
        rivals = [p for impl, p in peaks.items() if is_rival(impl) and name in impl and p]
        ours = peaks.get(OURS)
        return ours / min(rivals) if rivals and ours is not None else None

    return share


def _moves_64_mb(row: Row) -> bool:
    return row.dtype == "bfloat16" and 2 * row.case["batch"] * row.case["k"] * row.case["dim"] >= 64e6


def _of_size(**given: Any) -> Callable[[Row], bool]:
    """Under autocast, at this size, not causal."""
    wanted = {"causal": False, **given}
    return lambda row: row.dtype == "bfloat16" and all(row.case.get(k, False) == v for k, v in wanted.items())


def _cpu() -> list[Bar]:
    found = []
    for op in ("coor_descent", "soft_topk"):
        for stage in ("forward", "backward"):
            found.append(Bar("50 eager steps", op, stage, 10, _against("eager"), "×"))
        found.append(Bar("a row of a million", op, "forward", 300, _ms, "ms", _cols(1 << 20), most=True))
    for words, fused in (("fastest rival", None), ("fastest rival, fused=True", "fused")):
        found.append(Bar(words, "lion", "step", 1.0, _against(), "×", _of_model({"fused": fused})))
    return found


BARS: Sequence[Bar] = (*_norms(), *_weighted_sums(), *_soft_topks(), *_lions(), *_routing())
CPU_BARS: Sequence[Bar] = tuple(_cpu())
# what scripts of their own measured, brought into this form by performance.py
FIRST_STEP_BARS: Sequence[Bar] = (
    Bar("llama-1b, no compiled kernels on disk", "lion", "first step", 1000, _ms, "ms", most=True),
    Bar("llama-1b, memory beside the states", "lion", "first step", 1.0, _peak, "MiB", most=True),
)
CPU_NORM_BARS: Sequence[Bar] = tuple(
    Bar("F's time + 5 % + 5 µs", op, stage, 1.0, _of_allowed, "×", most=True)
    for op in ("layer_norm", "rms_norm")
    for stage in ("forward, no gradients", "forward", "forward + backward")
)


class Verdict(NamedTuple):
    """A bar against the cells that it is asked of: the worst one, and how many of them meet it."""

    worst: float
    at: Row
    met: int
    cells: int


def judge(bar: Bar, found: Iterable[Row]) -> Verdict | None:
    """None where no cell was measured."""
    here = [row for row in found if (row.op, row.stage) == (bar.op, bar.stage) and bar.where(row)]
    measured = [(value, row) for row in here if (value := bar.measure(row)) is not None]
    if not measured:
        return None
    value, row = (max if bar.most else min)(measured, key=lambda pair: pair[0])
    met = sum((v <= bar.asked) if bar.most else (v >= bar.asked) for v, _ in measured)
    return Verdict(value, row, met, len(measured))


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def asked(bar: Bar) -> str:
    """What a bar asks for, with its unit."""
    return f"{'≤' if bar.most else '≥'} {with_unit(bar.asked, bar.unit)}"


def with_unit(value: float, unit: str) -> str:
    """Three digits and the unit: 1.25×, 92 % of copy."""
    return f"{number(value)}{'' if unit == '×' else ' '}{unit}"
