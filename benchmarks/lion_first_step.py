"""Lion's first step on a GPU: how long it stalls, and what memory it takes beside its states.

    python benchmarks/lion_first_step.py --out benchmarks/results/h200/raw/lion_first_step

writes .json and .md: all modes one after another with Llama 1B's shapes, in two processes. "empty cache" is the first
of them, with an empty Triton cache, as on a machine that never ran these kernels: compiling is in it, and in its first
mode what Triton builds once. "filled cache" is the second one: every later start. Imports of torch and Triton are in
neither. torch's fused AdamW stands beside.

Extra peak memory is what was asked of torch's allocator at the highest point of the step, less the states that remain.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from onepass.core import files
from onepass.ops.lion.spec import MODELS
from onepass.optim import Lion

FP32, BF16 = torch.float32, torch.bfloat16
# name → (dtype of the parameters, options; None: torch's AdamW)
MODES: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "fp32": (FP32, {}),
    "bf16, nothing kept": (BF16, {"low_precision": "none"}),
    "bf16 + remainder": (BF16, {}),
    "bf16 + int8 momentum": (BF16, {"low_precision": "none", "state_dtype": "int8"}),
    "bf16 + remainder + int8 momentum": (BF16, {"state_dtype": "int8"}),
    "bf16, torch AdamW fused": (BF16, None),
}


def measure(mode: str, model: str) -> dict[str, Any]:
    """One first step."""
    dtype, options = MODES[mode]
    if options is not None:
        # its import is no part of a step
        import onepass.ops.lion.kernels_triton  # noqa: F401
    params = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in MODELS[model]()]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(params, fused=True) if options is None else Lion(params, **options)
    )
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        if len(times) == 1:
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    states = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return {
        "mode": mode, "model": model, "first_ms": round(times[0], 1), "third_ms": round(times[2], 2),
        "states_mib": round(states / 2**20, 1), "extra_peak_mib": round((peak - before - states) / 2**20, 3),
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip


def in_a_process(model: str, cache: str) -> list[dict[str, Any]]:
    """All modes in a process with a Triton cache."""
    command = [sys.executable, __file__, "--here", "--model", model]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return found


def main() -> int:
    """Measure every mode, twice."""
    parser = argparse.ArgumentParser(description="Lion's first step: stall and memory")
    parser.add_argument("--out", type=Path, default=Path("lion_first_step"), help="where to write, without a suffix")
    parser.add_argument("--model", choices=list(MODELS), default="llama-1b")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, with its cache
    args = parser.parse_args()
    if args.here:
        print(json.dumps([measure(mode, args.model) for mode in MODES]))
        return 0
    rows = [
        "| | first step, empty cache | filled cache | third step | states | extra peak memory |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as cache:
        empty, filled = (in_a_process(args.model, cache) for _ in range(2))
    for cold, r in zip(empty, filled, strict=True):
        r["first_ms_empty_cache"] = cold["first_ms"]
        rows.append(
            f"| {r['mode']} | {cold['first_ms']:.0f} ms | {r['first_ms']:.0f} ms | {r['third_ms']:.2f} ms | "
            f"{r['states_mib']:.1f} MiB | {r['extra_peak_mib']:.3f} MiB |"
        )
    about = f"First steps on {filled[0]['gpu']}, {args.model}, torch {filled[0]['torch']}.\n\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    files.write(args.out.with_suffix(".json"), json.dumps(filled, indent=1) + "\n")
    files.write(args.out.with_suffix(".md"), about + "\n".join(rows) + "\n")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
