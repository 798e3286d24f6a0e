"""Differentiable top-k on a CPU against the published eager iteration of 50 steps (colt5-attention).

    python benchmarks/cpu_topk.py [--json benchmarks/results/cpu/soft_topk.json] [--threads 2]

The process keeps to as many cores as it has threads; `onepass bench --report benchmarks/results/cpu` makes the table.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

import onepass
from onepass.bench.cpu import measure
from onepass.core.spec import Case, Impl, Missing, backward_of, optional

CELLS = ((1, 1 << 20), (256, 8192), (16, 8192), (64, 1024))
EPS = 0.1
STEPS = 50


def cases() -> Iterator[Case]:
    """Both operators, both directions, beside 50 steps of the iteration."""
    for op in ("soft_topk", "coor_descent"):
        for rows, cols in CELLS:
            for stage in ("forward", "backward"):

                def make(op: str = op, rows: int = rows, cols: int = cols, stage: str = stage) -> Mapping[str, Impl]:
                    eager = optional("colt5_attention.coor_descent")
                    s, gy, k = (
                        torch.randn(rows, cols).requires_grad_(stage == "backward"),
                        torch.randn(rows, cols),
                        cols / 8,
                    )

                    def staged(run: Callable[[], Tensor]) -> Impl:
                        return run if stage == "forward" else backward_of(run, (s,), gy)

                    def ours() -> Tensor:
                        if op == "soft_topk":
                            return onepass.soft_topk(s, k, eps=EPS)
                        return onepass.coor_descent(s, n_iters=STEPS, k=k, eps=EPS)

                    rival = (
                        Missing("colt5-attention")
                        if eager is None
                        else staged(lambda: eager.coor_descent(s, n_iters=STEPS, k=k, eps=EPS))
                    )
                    return {"onepass": staged(ours), "colt5 eager T=50": rival}

                told = (
                    {"rows": rows, "cols": cols, "steps": STEPS}
                    if op == "coor_descent"
                    else {"rows": rows, "cols": cols}
                )
                floor = rows * cols * 4 * (2 if stage == "forward" else 3)
                yield Case(op, stage, told, torch.float32, floor, make, device="cpu")


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="differentiable top-k on a CPU")
    parser.add_argument("--json", type=Path, default=Path("soft_topk_cpu.json"), help="where to write the records")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    torch.set_num_threads(args.threads)
    return measure("soft_topk", list(cases()), args.json)


if __name__ == "__main__":
    raise SystemExit(main())
