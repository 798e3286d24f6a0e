"""Error against float64, and memory kept for backward, of every differentiable top-k: a table and a record of it.

python benchmarks/topk_accuracy.py [--device cuda] [--rows 64] [--cols 8192] [--out DIR]
writes DIR/soft_topk.json and .md (benchmarks/results/<gpu>/accuracy); seconds on a GPU.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from onepass.core import files
from onepass.core.spec import optional
from onepass.ops.coor_descent import rivals as descent_rivals
from onepass.ops.soft_topk import rivals

SCHEDULES: dict[str, dict[str, Any]] = {
    "T=50, eps 0.1": {"n_iters": 50, "eps": 0.1},
    "T=20, eps 4→0.03": {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
}
EPS = 0.1


class Entry(NamedTuple):
    """One implementation and its definition."""

    what: str
    name: str
    run: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]  # the same in float64
    sums_to_k: bool


def entries(k: float) -> Iterator[Entry]:
    """Everything installed that computes one of our operators."""
    eager = optional("colt5_attention.coor_descent")
    kernel = optional("colt5_attention.triton_coor_descent")
    entmax = optional("entmax")
    for what, o in SCHEDULES.items():

        def exact(s: Tensor, o: dict[str, Any] = o) -> Tensor:
            return onepass.coor_descent(s.double(), k=k, **o)

        yield Entry(what, "onepass.coor_descent", lambda s, o=o: onepass.coor_descent(s, k=k, **o), exact, False)
        if eager is not None:
            yield Entry(what, "colt5 eager", lambda s, o=o: eager.coor_descent(s, k=k, **o), exact, False)
        if kernel is not None and torch.cuda.is_available():
            for n in (1, 4, 10):
                yield Entry(
                    what, f"colt5 Triton, {n} segments",
                    lambda s, o=o, n=n: kernel.triton_coor_descent(s, k=k, checkpoint_segments=n, **o), exact, False,
                )  # fmt: skip
        yield Entry(what, "torch", lambda s, o=o: descent_rivals.descent(s, k=k, **o), exact, False)
    others: dict[str, list[tuple[str, Callable[[Tensor], Tensor]]]] = {
        "sigmoid": [("SOFT by Sinkhorn (200)", lambda s: rivals.sinkhorn(s, k, EPS))],
        "laplace": [("LapSum by sorting", lambda s: rivals.lapsum(s, k, EPS))],
    }
    if entmax is not None:
        others["clamp"] = [("entmax budget_bisect", lambda s: entmax.budget_bisect(s / EPS, budget=k))]
    for kind in ("capped_exp", "sigmoid", "laplace", "clamp"):

        def solved(s: Tensor, kind: str = kind) -> Tensor:
            return onepass.soft_topk(s.double(), k, eps=EPS, kind=kind)

        yield Entry(
            kind, "onepass.soft_topk", lambda s, kind=kind: onepass.soft_topk(s, k, eps=EPS, kind=kind), solved, True
        )
        for name, run in others.get(kind, []):
            yield Entry(kind, name, run, solved, True)


def kept_bytes(run: Callable[[Tensor], Tensor], s: Tensor) -> int:
    """Memory that a forward pass leaves behind for its backward, besides its output and the scores."""
    if s.is_cuda:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = run(s)
        return torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = run(s)
    gone = {s.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()}
    return sum(size for pointer, size in saved.items() if pointer not in gone)


def measure(entry: Entry, s: Tensor, gy: Tensor, k: float) -> dict[str, float | None]:
    """Errors of one implementation, and what it keeps."""
    leaf, wide = s.clone().requires_grad_(), s.double().requires_grad_()
    entry.run(leaf)  # compiles
    kept = kept_bytes(entry.run, leaf) / s.numel()
    y, exact = entry.run(leaf), entry.exact(wide)
    (ds,) = torch.autograd.grad(y, leaf, gy)
    (true,) = torch.autograd.grad(exact, wide, gy.double())
    error = (y.double() - exact).abs().max().item()
    off = ((y.double().sum(-1) - k).abs().max() / k).item()
    cosine = torch.cosine_similarity(ds.double().flatten(), true.flatten(), 0).item()
    return {
        "error_of_y": error,
        "sum_off": off if entry.sums_to_k else None,
        "one_minus_cosine_of_ds": 1 - cosine,
        "kept_bytes_per_element": kept,
    }


def table(record: dict[str, Any]) -> str:
    """The record as markdown."""
    lines = [
        f"{record['device']}, torch {record['torch']}, {record['rows']}×{record['cols']} normal scores in fp32, "
        f"k = n/8, eps = {EPS} where nothing else is said.",
        "",
        "| | | error of y | \\|Σy − k\\|/k | 1 − cosine of ds | bytes per element kept for backward besides s, y |",
        "|---|---|---|---|---|---|",
    ]
    for r in record["results"]:
        if "failed" in r:
            lines.append(f"| {r['what']} | {r['impl']} | failed: {r['failed']} | – | – | – |")
            continue
        sums = "–" if r["sum_off"] is None else f"{r['sum_off']:.1e}"
        lines.append(
            f"| {r['what']} | {r['impl']} | {r['error_of_y']:.1e} | {sums} | {r['one_minus_cosine_of_ds']:.1e} | "
            f"{r['kept_bytes_per_element']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure everything, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(20)
    s = torch.randn(args.rows, args.cols).to(args.device)
    gy = torch.randn(args.rows, args.cols).to(args.device)
    k = args.cols / 8
    results: list[dict[str, Any]] = []
    for entry in entries(k):
        result: dict[str, Any] = {"what": entry.what, "impl": entry.name}
        try:
            result |= measure(entry, s, gy, k)
        except Exception as error:
            result["failed"] = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        results.append(result)
    record = {
        "device": torch.cuda.get_device_name() if s.is_cuda else "CPU",
        "torch": torch.__version__,
        "rows": args.rows,
        "cols": args.cols,
        "results": results,
    }
    print(table(record))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        files.write(args.out / "soft_topk.json", json.dumps(record, indent=1) + "\n")
        files.write(args.out / "soft_topk.md", table(record))


if __name__ == "__main__":
    main()
