"""`python -m benchmarks program`: what a layer costs where it is used, in eager, compiled and captured programs."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from onepass.core.about import device_name, settings, versions
from onepass.core.garbage import collected, no_collection
from onepass.train.commands.errors import UserError

from . import records
from .programs import Program, programs
from .select import pick_device

MODES = ("eager", "compiled", "reduce-overhead", "graph")
# calls that are timed, and calls that are profiled
CALLS, PROFILED, QUICK_CALLS = 30, 5, 8
# fields of a record that are numbers, in the table's order
NUMBERS = ("host_us", "gpu_us", "wall_us", "kernels", "peak_mib", "first_s")

Step = Callable[[], Any]


def _step(program: Program, device: str, mode: str) -> Step:
    """Return one training step without an optimizer; parameters' gradients are new in every step."""
    module, x = program.module(device), program.x(device)
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    run = module
    if mode in ("compiled", "reduce-overhead"):
        torch.compiler.reset()
        run = torch.compile(module, mode="reduce-overhead" if mode == "reduce-overhead" else None)  # type: ignore[assignment]
    dy: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=program.autocast):
            return run(x)  # type: ignore[no-any-return]

    def step() -> Any:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        if not program.backward:
            with torch.no_grad():
                return forward()
        y = forward()
        if not dy:
            dy.append(torch.randn_like(y.detach()))
        return torch.autograd.grad(y, wanted, dy[0], allow_unused=True)

    return _captured(step) if mode == "graph" else step


def _captured(step: Step) -> Step:
    """Return the replay of a CUDA graph of the whole step."""
    # autograd runs a backward pass on the stream of its forward pass: both belong on the stream of the capture
    new_stream: Any = torch.cuda.Stream
    stream, graph = new_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    kept = []
    with collected(), torch.cuda.graph(graph, stream=stream):
        kept.append(step())

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _gpu(step: Step) -> tuple[float, float]:
    """Return GPU time in µs and the number of kernels, copies and fills of one step, by the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined, no-untyped-call]
    return sum(e.device_time for e in found) / PROFILED, len(found) / PROFILED


def measure(program: Program, device: str, mode: str, calls: int) -> dict[str, Any]:
    """Return the record of a program in a mode: medians over `calls` steps."""
    torch.manual_seed(0)
    # what an earlier program has left is not this one's
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    began = time.perf_counter()
    step = _step(program, device, mode)
    step()
    _wait(device)
    first_s = time.perf_counter() - began
    for _ in range(4):
        step()
    _wait(device)
    peak = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        _wait(device)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    host, wall = [], []
    with no_collection():
        for _ in range(calls):
            start = time.perf_counter()
            step()
            host.append(time.perf_counter() - start)
            _wait(device)
            wall.append(time.perf_counter() - start)
    # the host runs ahead of the GPU in a loop of steps; waits between them would add the host's time to the GPU's
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait(device)
    loop = (time.perf_counter() - start) / calls
    gpu_us, kernels = _gpu(step) if device == "cuda" else (None, None)
    return {
        "program": program.name, "case": program.case, "mode": mode, "base": program.base,
        "host_us": round(1e6 * statistics.median(host), 1), "gpu_us": gpu_us and round(gpu_us, 1),
        "wall_us": round(1e6 * loop, 1), "kernels": kernels, "peak_mib": peak and round(peak, 1),
        "first_s": round(first_s, 2),
    }  # fmt: skip


def against(found: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return, by index of the record, the base's step time over the program's, in the same case and mode."""
    times = {(r["program"], r["case"], r["mode"]): r["wall_us"] for r in found}
    ratios = {}
    for i, r in enumerate(found):
        base = times.get((r["base"], r["case"], r["mode"]))
        if base is not None:
            ratios[i] = base / r["wall_us"]
    return ratios


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Return the records as a table; the last column is the base's step time over the program's."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("case", "program", "mode"):
        shown.add_column(name, overflow="fold")
    for name in ("host µs", "GPU µs", "step µs", "kernels", "peak MiB", "first s", "× base"):
        shown.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    ratios, last = against(found), ("", "")
    for i, r in enumerate(found):
        key = r["case"], r["program"]
        head = ["" if key[0] == last[0] else key[0], "" if key == last else key[1]]
        numbers = ["–" if r[n] is None else f"{r[n]:.2f}" if n == "first_s" else f"{r[n]:.0f}" for n in NUMBERS]
        shown.add_row(*head, r["mode"], *numbers, f"{ratios[i]:.2f}" if i in ratios else "")
        last = key
    return shown


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure the programs that the arguments select; return 1 if one failed, else 0."""
    device = pick_device(args.device)
    left_out = () if device == "cuda" else ("reduce-overhead", "graph")
    if args.no_compile:
        left_out = (*left_out, "compiled", "reduce-overhead")
    chosen = [
        (p, mode)
        for p in programs(device)
        for mode in MODES
        if mode not in left_out and (not args.case or any(text in f"{p.name}, {p.case}, {mode}" for text in args.case))
    ]
    if not chosen:
        raise UserError("no case matches; --list shows what there is")
    if args.list:
        for p, mode in chosen:
            console.print(f"{p.name}, {p.case}, {mode}", markup=False, soft_wrap=True)
        return 0
    if args.json is not None:
        records.check_writable(args.json)
    header: dict[str, Any] = {
        "header": True, **versions(), "device": device, "gpu": device_name(torch.device(device)),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "settings": settings(), "failed": [],
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    for p, mode in chosen:
        with console.status(f"{p.name}, {p.case}, {mode}"):
            try:
                found.append(measure(p, device, mode, QUICK_CALLS if args.quick else CALLS))
            except Exception as error:
                # one program that fails leaves the others their turn; the command ends with exit code 1
                failed.append(f"{p.name}, {p.case}, {mode}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if args.json is not None:
            records.write(args.json, [header | {"failed": failed}, *found])
    console.print(table(found))
    for line in failed:
        console.print(f"failed: {line}", style="red", markup=False, soft_wrap=True)
    console.print("× base: step time of the dense layer, torch's norm or the model's own norms, over the program's")
    return 1 if failed else 0


__all__ = ["MODES", "against", "measure", "run", "table"]
