"""The picture in the README of the differentiable top-k, and its table of T steps against convergence.

python benchmarks/topk_gates.py [--out docs/soft_topk_gates.png]

Float64 on the CPU, fixed seed: the same numbers everywhere.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.core import files

KINDS = ("capped_exp", "sigmoid", "laplace", "clamp")
TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
STEPS: dict[str, dict[str, Any]] = {
    "T = 20, eps = 1": {"n_iters": 20, "eps": 1.0},
    "T = 50, eps = 0.1": {"n_iters": 50, "eps": 0.1},
    "T = 20, eps = 0.03 from 4, decay 0.7": {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
    "T = 20, eps = 0.03 constant": {"n_iters": 20, "eps": 0.03},
}


def slope(y: torch.Tensor, kind: str) -> torch.Tensor:
    """φ' of each gate, from the gate itself."""
    if kind == "capped_exp":
        return torch.where(y < 1, y, 0.0)
    if kind == "sigmoid":
        return y * (1 - y)
    return torch.minimum(y, 1 - y) if kind == "laplace" else ((y > 0) & (y < 1)).double()


def picture(path: Path) -> None:
    """Draw gates over scores: a panel per kind, a curve per temperature, and T steps beside the converged operator."""
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    s = torch.randn(1000, dtype=torch.float64).sort().values
    k = 250
    threshold = s[-k].item()
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flatten()
    colours = ("#b8d4ea", "#6baed6", "#2171b5", "#08306b")
    for panel, kind in zip(panels, KINDS, strict=False):
        for eps, colour in zip(TEMPERATURES, colours, strict=True):
            panel.plot(s, onepass.soft_topk(s, k, eps=eps, kind=kind), color=colour, label=f"eps = {eps:g}")
        panel.set_title(f'kind="{kind}"', loc="left", fontsize=11)
    panel = panels[4]
    panel.plot(s, onepass.soft_topk(s, k, eps=0.03), color="#08306b", label=f"soft_topk: Σ = {k}")
    for (name, options), colour in zip(list(STEPS.items())[2:], ("#e6550d", "#fdae6b"), strict=True):
        y = onepass.coor_descent(s, k=k, **options)
        label = "eps from 4" if "from" in name else "constant eps"
        panel.plot(s, y, color=colour, label=f"{label}: Σ = {y.sum():.0f}")
    panel.set_title("coor_descent, T = 20, beside soft_topk (eps = 0.03)", loc="left", fontsize=11)
    panel = panels[5]
    for kind, colour in zip(KINDS, ("#08306b", "#e6550d", "#31a354", "#756bb1"), strict=True):
        y = onepass.soft_topk(s, k, eps=0.3, kind=kind)
        panel.plot(s, slope(y, kind) / 0.3, color=colour, label=kind)
    panel.set_title("who gets a gradient: φ′/eps (eps = 0.3)", loc="left", fontsize=11)
    for panel in panels:
        panel.axvline(threshold, color="0.6", linewidth=0.8, linestyle=":")
        panel.grid(color="0.93")
        panel.legend(fontsize=8, loc="upper left")
        panel.set_xlim(-2.5, 3)
    for panel in panels[:5]:
        panel.set_ylabel("gate y")
    for panel in panels[3:]:
        panel.set_xlabel("score s   (dotted: the k-th largest)")
    figure.suptitle(f"Gates of {s.numel()} normal scores, k = {k}", fontsize=12)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": None})
    files.write(path, out.getvalue())


def table(rows: int = 64, cols: int = 4096) -> str:
    """Compare coor_descent's T steps with soft_topk at the same eps: row sums, values, gradients."""
    torch.manual_seed(0)
    s = torch.randn(rows, cols, dtype=torch.float64, requires_grad=True)
    gy = torch.randn(rows, cols, dtype=torch.float64)
    lines = [
        "| steps | k | Σy / k | largest difference of a gate | cosine of the scores' gradients |",
        "|---|---|---|---|---|",
    ]
    for name, options in STEPS.items():
        for part in (8, 16):
            k = cols / part
            steps = onepass.coor_descent(s, k=k, **options)
            solved = onepass.soft_topk(s, k, eps=options["eps"])
            found = [torch.autograd.grad(y, s, gy)[0].flatten() for y in (steps, solved)]
            cosine = torch.cosine_similarity(found[0], found[1], 0).item()
            share = (steps.sum(-1).mean() / k).item()
            gap = (steps - solved).abs().max().item()
            lines.append(f"| {name} | n/{part} | {share:.2f} | {gap:.1g} | {cosine:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the picture goes")
    args = parser.parse_args()
    if args.out is not None:
        picture(args.out)
    print(table())


if __name__ == "__main__":
    main()
