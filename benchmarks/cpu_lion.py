"""Lion's step on two CPU cores, as it is and with `fused=True`, against lion-pytorch: eager, foreach, compiled.

    python benchmarks/cpu_lion.py [--json benchmarks/results/cpu/lion.json] [--threads 2]

The process keeps to as many cores as it has threads. Implementations take turns, round after round, so that a machine
that others use disturbs them alike; `onepass bench --report benchmarks/results/cpu` makes the table.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.bench.cpu import measure
from onepass.core.spec import Case, Impl, Missing, Prepared, optional
from onepass.ops.lion.spec import count, floor_bytes, gpt2_124m
from onepass.optim import Lion

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "one tensor of 16 M": [(1 << 24,)],
    "3 layers of GPT-2": gpt2_124m()[2 : 2 + 36],
    "300 small tensors": [(997 + 7 * i,) for i in range(300)],
}

Step = Callable[[], Any]


def prepared(build: Callable[[list[Tensor]], Step], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Prepared:
    """A step over parameters of its own."""

    def make() -> Step:
        params = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return build(params)

    return Prepared(make)


def compiled(params: list[Tensor]) -> Step:
    """lion-pytorch's update of one tensor, compiled, in a loop: what its optimizer does around it costs extra."""
    from lion_pytorch.lion_pytorch import update_fn

    update: Callable[..., Any] = torch.compile(update_fn)
    exp_avgs = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step() -> None:
        for p, m in zip(params, exp_avgs, strict=True):
            update(p, p.grad, m, 1e-4, 0.1, 0.9, 0.99)

    return step


def cases() -> list[Case]:
    """Every set of shapes in fp32, without a compiler and with one."""
    rival = optional("lion_pytorch")
    found = []
    for (name, shapes), fused in itertools.product(SHAPES.items(), (None, True)):

        def make(shapes: Sequence[tuple[int, ...]] = shapes, fused: bool | None = fused) -> Mapping[str, Impl]:
            def impl(build: Callable[[list[Tensor]], Step]) -> Impl:
                return Missing("lion-pytorch") if rival is None else prepared(build, shapes, torch.float32)

            return {
                "onepass": prepared(lambda params: Lion(params, fused=fused, **OPTIONS).step, shapes, torch.float32),
                "lion-pytorch": impl(lambda params: rival.Lion(params, **OPTIONS).step),
                "lion-pytorch foreach": impl(
                    lambda params: optional("lion_pytorch.foreach").Lion(params, **OPTIONS).step
                ),
                "lion-pytorch torch.compile": impl(compiled),
            }

        elements = count(shapes)
        told = {"model": name, "tensors": len(shapes), "elements": elements, **({"fused": "fused"} if fused else {})}
        floor = round(elements * floor_bytes(torch.float32, torch.float32, "none"))
        found.append(Case("lion", "step", told, torch.float32, floor, make, device="cpu"))
    return found


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="Lion's step on a CPU")
    parser.add_argument("--json", type=Path, default=Path("lion_cpu.json"), help="where to write the records")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    torch.set_num_threads(args.threads)
    return measure("lion", cases(), args.json, measure_ms=100.0)


if __name__ == "__main__":
    raise SystemExit(main())
