"""How often the order of a sum shows in `rms_norm(rounding="twice")`: the kernel under Triton's interpreter, fp16.

Run it with TRITON_INTERPRET=1. The kernel adds squares in the order that it has on a GPU; torch on a CPU has another. A
GPU's reciprocal square root may differ too, so this is a lower bound of what a GPU shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.norm.options import forward_op


def measure(rows: int, cols: int) -> dict[str, float]:
    """Return shares of rows whose 1/rms differs, and of numbers of y that differ, from Llama's formula on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator).half()
    w = (torch.rand(cols, generator=generator) + 0.5).half()
    f = x.float()
    rstd = torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)
    y = onepass.rms_norm(x, w, rounding="twice")
    stats = forward_op(x, None, None, w, None, 1e-6, 0.0, False, False, True, False, 0, x.dtype, True)[4]
    different = (y != w * (f * rstd).half()).double().mean()
    return {"rows": rows, "cols": cols, "rstd": float((stats[0] != rstd[:, 0]).double().mean()), "y": float(different)}


def main() -> None:
    """Measure four widths; print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    if not INTERPRET:
        parser.error("needs TRITON_INTERPRET=1")
    found = [measure(max(128, (1 << 20) // cols), cols) for cols in (128, 1024, 4096, 8192)]
    for record in found:
        sys.stdout.write(f"{record}\n")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
