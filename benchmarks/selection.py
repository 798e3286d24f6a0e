"""The selection against its rivals on one GPU: exactness, times of calls and of kernels, and a sweep of launch shapes.

python benchmarks/selection.py --out selection.json [--cells NAME ...] [--variants] [--seconds 220]

Every cell is compared with a stable sort first. Times are medians in µs with a cold L2: `call` from eager calls,
`graph` from replays of a captured call, `host` of the launching thread, `kernels` from the profiler. A failure is
recorded with its cell, and the rest goes on. Rivals are torch.topk and, where it is installed, FlashInfer's top_k: as
it comes, and with its settings for the same order and indices in every call. `--variants` changes one constant of
`onepass.ops.topk.plan` at a time.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.bench.timers import CudaTimer
from onepass.core import files
from onepass.core.about import versions
from onepass.ops.topk import plan


class Cell(NamedTuple):
    """One measurement: what is selected from what."""

    rows: int
    cols: int
    k: int
    dtype: torch.dtype = torch.float32
    best_first: bool = True
    values: str = "normal"
    lengths: bool = False  # rows end anywhere from k on

    @property
    def name(self) -> str:
        """Return a name for tables and --cells."""
        options = [str(self.dtype).removeprefix("torch.")]
        options += [] if self.best_first else ["by index"]
        options += [] if self.values == "normal" else [self.values]
        options += ["lengths"] if self.lengths else []
        return f"{self.rows}x{self.cols} k {self.k}, {', '.join(options)}"


SHAPES = (
    (128, 131072, 2048), (64, 32768, 2048), (8, 1 << 20, 65536), (4096, 8192, 512), (4096, 1024, 64), (2, 32768, 2048),
    (64, 131072, 2048), (8, 1 << 20, 2048), (2048, 131072, 2048), (1, 131072, 2048), (256, 65536, 1024),
)  # fmt: skip
KINDS = (
    "a third equal",
    "all equal",
    "top third equal",
    "in one place",
    "unsampled above",
    "sampled above",
    "heavy tails",
)


def cells() -> Iterator[Cell]:
    """Yield every measured cell, the bars first."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            yield Cell(*shape, dtype)
            yield Cell(*shape, dtype, best_first=False)
    for shape in ((64, 131072, 2048), (8, 1 << 20, 65536)):
        for kind in KINDS:
            yield Cell(*shape, values=kind)
    yield Cell(2048, 131072, 2048, best_first=False, values="top third equal")
    for shape in ((64, 131072, 2048), (2048, 131072, 2048), (4096, 8192, 512)):
        yield Cell(*shape, best_first=False, lengths=True)


def sampled(n: int, groups: int, group: int) -> Tensor:
    """Return the columns of the sample of a whole row, as `pivot_kernel` takes it."""
    n_groups = -(-n // group)
    at = torch.arange(groups)
    if n_groups > groups:
        scattered = ((at * 2654435769) & 0xFFFFFFFF) * (n_groups // groups) >> 32
        at = at * n_groups // groups + scattered
    columns = (at[:, None] * group + torch.arange(group)).flatten()
    return columns[columns < n]


def scores(cell: Cell, device: str, sms: int) -> Tensor:
    """Return the scores of a cell, the same in every run."""
    torch.manual_seed(0)
    s = torch.randn(cell.rows, cell.cols, device=device)
    if cell.values == "a third equal":
        # scores of ReLUs: the k-th lies above the plateau at 0
        s = torch.where(torch.rand_like(s) < 1 / 3, 0.0, s.abs())
    elif cell.values == "all equal":
        s.zero_()
    elif cell.values == "top third equal":
        s.clamp_(max=0.43)
    elif cell.values == "in one place":
        s[:, cell.cols // 2 : cell.cols // 2 + 2 * cell.k] += 10
    elif cell.values == "heavy tails":
        s = s.pow(9)
    elif cell.values in ("unsampled above", "sampled above"):
        shape = plan.of_selection(cell.rows, cell.cols, cell.k, s.element_size(), sms)
        assert isinstance(shape, plan.Pivot)
        columns = sampled(cell.cols, shape.groups, shape.group).to(device)
        s[:, columns] += -20 if cell.values == "unsampled above" else 20
    return s.to(cell.dtype)


def lengths(cell: Cell, device: str) -> Tensor | None:
    """Return the rows' lengths, the same in every run."""
    if not cell.lengths:
        return None
    torch.manual_seed(1)
    return torch.randint(cell.k, cell.cols + 1, (cell.rows,), device=device, dtype=torch.int32)


def expected(s: Tensor, k: int, best_first: bool, ends: Tensor | None) -> Tensor:
    """Return the indices that a stable sort gives, by rows that fit the memory."""
    found = []
    for first in range(0, len(s), 256):
        wide = s[first : first + 256].float()
        if ends is not None:
            columns = torch.arange(s.shape[1], device=s.device)
            wide = wide.masked_fill(columns >= ends[first : first + 256, None], -math.inf)
        indices = wide.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        found.append(indices if best_first else indices.sort(-1).values)
    return torch.cat(found)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a captured call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(_kept: Any = kept) -> None:
        graph.replay()

    return replay


def kernel_times(call: Callable[[], Any], flush: Tensor, repetitions: int = 10) -> dict[str, float]:
    """Return the mean GPU time of each kernel of a call with a cold L2, in µs."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(repetitions):
            flush.fill_(0.5)
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in record.events():
        if "CUDA" in str(event.device_type):
            name = event.name if len(event.name) < 60 else event.name[:57] + "..."
            times[name] = times.get(name, 0.0) + event.device_time / repetitions
    # the flush fills with a float
    return {name: round(us, 2) for name, us in times.items() if "Fill" not in name}


def rivals(cell: Cell, s: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the calls to compare with; FlashInfer's has no lengths."""
    calls: dict[str, Callable[[], Any]] = {"torch.topk": lambda: torch.topk(s, cell.k, sorted=cell.best_first)}
    if importlib.util.find_spec("flashinfer") and not cell.lengths:
        top_k = importlib.import_module("flashinfer.topk").top_k
        calls["flashinfer"] = lambda: top_k(s, cell.k, sorted=cell.best_first)
        # 1: of equal scores the smaller indices
        calls["flashinfer, deterministic"] = lambda: top_k(
            s, cell.k, sorted=cell.best_first, deterministic=True, tie_break=1
        )
    return calls


def timed(call: Callable[[], Any], timer: CudaTimer) -> dict[str, float]:
    """Return a call's times in µs, and the memory that it takes beyond what is held."""
    found = {"call": round(timer.us(call), 1), "host": round(timer.host_us(call), 1)}
    found["graph"] = round(timer.us(graphed(call)), 1)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    found["peak MB"] = round((torch.cuda.max_memory_allocated() - held) / 1e6, 1)
    return found


def measure(cell: Cell, timer: CudaTimer, flush: Tensor, sms: int, record: dict[str, Any]) -> None:
    """Check one cell and time it beside its rivals; what was found before a failure stays in `record`."""
    s, ends = scores(cell, "cuda", sms), lengths(cell, "cuda")

    def ours() -> Any:
        return onepass.topk(s, cell.k, sorted=cell.best_first, lengths=ends)

    top = ours()
    indices = expected(s, cell.k, cell.best_first, ends)
    record |= {
        "exact": torch.equal(top.indices, indices) and torch.equal(top.values, s.gather(-1, indices)),
        "gates": bool((top.gates == 1).all()),
        "same bits in 20 calls": all(torch.equal(ours().indices, top.indices) for _ in range(20)),
        "plan": str(plan.of_selection(cell.rows, cell.cols, cell.k, s.element_size(), sms)),
    }
    if ends is None:
        rows = sorted({0, cell.rows // 2, cell.rows - 1})
        alone = [onepass.topk(s[r : r + 1], cell.k, sorted=cell.best_first).indices for r in rows]
        record["alone"] = all(torch.equal(a[0], top.indices[r]) for a, r in zip(alone, rows, strict=True))
    record["onepass"] = timed(ours, timer)
    for name, call in rivals(cell, s).items():
        try:
            record[name] = timed(call, timer)
            if name.endswith("deterministic"):
                # without an order asked for, its indices come in an order of their own
                theirs = call()[1] if cell.best_first else call()[1].sort(-1).values
                record[name]["our indices"] = torch.equal(theirs, indices)
        except Exception:
            record[name] = {"failed": traceback.format_exc(limit=2)}
    for how in ("call", "graph"):
        record[f"ratio, {how}"] = round(record["torch.topk"][how] / record["onepass"][how], 2)
    record["GB/s, graph"] = round(s.numel() * s.element_size() / record["onepass"]["graph"] / 1e3)
    record["kernels"] = kernel_times(ours, flush)


# one constant at a time, and a few pairs; the cells where it matters
SMALL, LARGE, MANY, SHORT, WIDE = (
    Cell(64, 131072, 2048), Cell(8, 1 << 20, 2048), Cell(2048, 131072, 2048, best_first=False),
    Cell(64, 32768, 2048), Cell(8, 1 << 20, 65536),
)  # fmt: skip
WHOLE, FEW = Cell(4096, 8192, 512), Cell(2, 8192, 512)
LONG = (SMALL, LARGE, MANY)
SWEEP: tuple[tuple[dict[str, Any], tuple[Cell, ...]], ...] = (
    ({}, (*LONG, SHORT, WIDE, WHOLE, FEW)),
    ({"TILE_STAGES": 1}, LONG),
    ({"TILE_STAGES": 2}, LONG),
    ({"TILE_STAGES": 4}, LONG),
    ({"TILE_STAGES": 5}, LONG),
    ({"TILE": 256, "TILE_STAGES": 4}, LONG),
    ({"TILE": 1024, "TILE_STAGES": 2}, LONG),
    ({"TILE": 1024, "TILE_STAGES": 3}, LONG),
    ({"TILE": 1024, "TILE_WARPS": 2, "PER_SM": 16}, LONG),
    ({"TILE": 2048, "TILE_WARPS": 4, "PER_SM": 8}, LONG),
    ({"PER_SM": 16}, LONG),
    ({"PER_CHOOSING_WARP": 256}, LONG),
    ({"SAMPLE": 8192, "SAMPLE_OF_MANY": 16384}, LONG),
    ({"SAMPLE_PER_WARP": 512}, (SMALL, SHORT)),
    ({"SORT_PER_WARP_OF_FEW": 32}, (SMALL,)),
    ({"MAX_COLS": 4096}, (WHOLE, FEW)),
    ({"MERGED": 64}, (WIDE,)),
)


def sweep(timer: CudaTimer, flush: Tensor, seconds: float) -> dict[str, Any]:
    """Return each variant's time in a graph and the times of its kernels; stop after `seconds`."""
    from onepass.ops.topk import kernels_select

    found: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for changes, where in SWEEP:
        before = {name: getattr(plan, name) for name in changes}
        title = ", ".join(f"{name} {value}" for name, value in changes.items()) or "as it is"
        for cell in where:
            if time.monotonic() > deadline:
                found["stopped"] = f"before {title}, {cell.name}"
                return found
            record: dict[str, Any] = {}
            try:
                for name, value in changes.items():
                    setattr(plan, name, value)
                s = scores(cell, "cuda", sms)
                rows = kernels_select.Rows(s, None, None, None, True)

                def call(rows: Any = rows, cell: Cell = cell) -> Any:
                    # not onepass.topk: it replays calls of known layouts
                    return kernels_select.select(rows, cell.k, cell.best_first, gated=True)

                replay = graphed(call)
                record["graph"] = round(timer.us(replay), 1)
                values = s.topk(cell.k).values
                ours = call().values
                record["exact values"] = torch.equal(ours if cell.best_first else ours.sort(-1, True).values, values)
                record["kernels"] = kernel_times(call, flush)
            except Exception:
                record["failed"] = traceback.format_exc(limit=4)
            finally:
                for name, value in before.items():
                    setattr(plan, name, value)
            found.setdefault(title, {})[cell.name] = record
            print(f"{title:40} {cell.name:45} {json.dumps(record)[:200]}", flush=True)
    return found


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--cells", nargs="*", default=[], help="only cells whose names contain one of these")
    parser.add_argument("--variants", action="store_true", help="sweep the launch shapes too")
    parser.add_argument("--only-variants", action="store_true", help="sweep the launch shapes alone")
    parser.add_argument("--seconds", type=float, default=220.0, help="time for the cells and for the sweep, each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    timer, flush = CudaTimer(30.0, 5.0), torch.empty(64 << 20, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    record: dict[str, Any] = {"versions": versions(), "copy GB/s": round(timer.copy_gbps()), "cells": {}}

    def save() -> None:
        files.write(args.out, json.dumps(record, indent=1).encode())

    deadline = time.monotonic() + args.seconds
    for cell in () if args.only_variants else cells():
        if args.cells and not any(part in cell.name for part in args.cells):
            continue
        if time.monotonic() > deadline:
            record["stopped"] = f"before {cell.name}"
            break
        found: dict[str, Any] = {}
        record["cells"][cell.name] = found
        try:
            measure(cell, timer, flush, sms, found)
        except Exception:
            found["failed"] = traceback.format_exc(limit=6)
        short = {key: value for key, value in found.items() if key not in ("plan",)}
        print(f"{cell.name:50} {json.dumps(short)[:600]}", flush=True)
        save()
        torch.cuda.empty_cache()
    if args.variants or args.only_variants:
        record["variants"] = sweep(timer, flush, args.seconds)
    save()


if __name__ == "__main__":
    main()
