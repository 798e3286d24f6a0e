"""`onepass explain`: what one call does here: its path, bytes, floor, time, and launches with tiles and registers."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from onepass.core.options import command, number

from .cli import DTYPES, pick_device
from .cli import timer as timer_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPS = ("layer_norm", "rms_norm", "weighted_sum", "soft_topk", "topk", "coor_descent")
TEXT = """\
Make random tensors of a shape, call one operator on them, and say what the call does on this machine: which path it
takes and why, the bytes that it must move, the time of copying as many, each kernel that it launches, and its time."""
EXAMPLES = """\
examples:
  onepass explain rms_norm --shape 16384x4096 --dtype bf16
  onepass explain soft_topk --shape 64x1048576 --k 4096
  TRITON_INTERPRET=1 onepass explain layer_norm --shape 8x64     kernels and tiles without a GPU

The floor reads every input once and writes every output once; its time is that of a copy of as many bytes, measured in
the same run. Registers and spills are known on a GPU. `onepass bench` measures beside the rivals.
"""


class Launch(NamedTuple):
    """One kernel launch as it was asked for; `compiled` has registers and shared memory, if there is a GPU."""

    name: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    compiled: Any


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    line = "what one call does here: path, bytes, floor, kernels, registers, time"
    parser = command(commands, "explain", run, (line, TEXT, EXAMPLES))
    parser.add_argument("op", choices=OPS, metavar="OP", help=f"one of {', '.join(OPS)}")
    parser.add_argument("--shape", type=shape, required=True, metavar="RxC", help="rows and columns, as in 16384x4096")
    parser.add_argument(
        "--dtype", choices=(*DTYPES, *DTYPES.values()), default="fp32", metavar="DTYPE", help="default: fp32"
    )
    parser.add_argument(
        "--k", type=number(1, 2**31 - 1), metavar="N", help="of a top-k (default: a 16th of the columns)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")


def shape(text: str) -> tuple[int, int]:
    """Parse "16384x4096"."""
    found = re.fullmatch(r"(\d+)[x×,](\d+)", text)
    if not found or not (1 <= int(found[1]) * int(found[2]) <= 2**34):
        raise argparse.ArgumentTypeError(f"must be rows x columns, both at least 1, as in 16384x4096; got {text!r}")
    return int(found[1]), int(found[2])


def call(
    op: str, rows: int, cols: int, dtype: torch.dtype, device: str, k: int
) -> tuple[dict[str, Tensor], Callable[[], Any]]:
    """Return the tensors that a call reads, by name, and the call."""
    import torch

    import onepass

    x = torch.randn(rows, cols, dtype=dtype, device=device)
    vector = torch.randn(cols, dtype=dtype, device=device)
    match op:
        case "layer_norm":
            return {"x": x, "weight": vector, "bias": vector}, lambda: onepass.layer_norm(x, vector, vector)
        case "rms_norm":
            return {"x": x, "weight": vector}, lambda: onepass.rms_norm(x, vector)
        case "weighted_sum":
            return {"x": x, "weight": vector}, lambda: onepass.weighted_sum(x, vector)
        case "soft_topk":
            return {"scores": x}, lambda: onepass.soft_topk(x, k)
        case "topk":
            return {"scores": x}, lambda: onepass.topk(x, k)
        case _:
            return {"scores": x}, lambda: onepass.coor_descent(x, n_iters=50, k=k)


@contextlib.contextmanager
def seen() -> Iterator[list[Launch]]:
    """Collect the launches of this process; kernels are looked up anew, so that none is missed."""
    from onepass.core.launch import compiled as core

    launches: list[Launch] = []
    real = core.launch_specialized

    def watched(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        made = real(kernel, grid, *args, **options)
        names = [name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)]
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        constants = {name: given[name] for name in names if name in given}
        launches.append(Launch(kernel.fn.__name__, grid, constants, options, made))
        return made

    users = [
        m
        for name, m in sys.modules.items()
        if name.startswith("onepass.") and vars(m).get("launch_specialized") is real
    ]
    kept = dict(core._compiled)
    core._compiled.clear()
    for module in users:
        vars(module)["launch_specialized"] = watched
    try:
        yield launches
    finally:
        for module in users:
            vars(module)["launch_specialized"] = real
        core._compiled.update(kept)


def described(launch: Launch) -> str:
    """Return a launch as one line."""
    parts = [f"{launch.name}: {'×'.join(str(n) for n in launch.grid)} programs"]
    warps = launch.options.get("num_warps") or getattr(getattr(launch.compiled, "metadata", None), "num_warps", None)
    if warps:
        parts.append(f"{warps} warps")
    registers, spills = (getattr(launch.compiled, name, None) for name in ("n_regs", "n_spills"))
    if registers is not None:
        parts.append(f"{registers} registers, {spills} spilled, {launch.compiled.metadata.shared} bytes shared")
    tile = " ".join(f"{name}={value}" for name, value in launch.constants.items())
    return ", ".join(parts) + (f"; {tile}" if tile else "")


def size(count: float) -> str:
    """Write a number of bytes."""
    return f"{count:,.0f} B" if count < 1e4 else f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import torch
    from torch import Tensor

    from onepass.core.about import device_name
    from onepass.core.launch import path

    device = pick_device(args.device)
    (rows, cols), k = args.shape, args.k or max(1, args.shape[1] // 16)
    dtype: torch.dtype = getattr(torch, DTYPES.get(args.dtype, args.dtype))
    torch.manual_seed(0)
    tensors, function = call(args.op, rows, cols, dtype, device, k)
    function()  # what is imported on the first call is imported now
    with seen() as launches:
        result = function()
    made = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
    reads, writes = ({name: t.nbytes for name, t in found.items()} for found in (tensors, dict(enumerate(made))))
    total = sum(reads.values()) + sum(writes.values())
    timer = timer_of(device, quick=True)
    copy = timer.copy_gbps()
    floor = total / copy / 1e3
    taken, why = path(next(iter(tensors.values())))
    of_k = f", k = {k}" if args.op in ("soft_topk", "topk", "coor_descent") else ""
    rows_ = [
        ("call", f"{args.op}, {rows}×{cols} {DTYPES.get(args.dtype, args.dtype)}{of_k}, forward"),
        ("on", f"{device}: {device_name(torch.device(device))}"),
        ("path", f"{taken} ({why})"),
        ("reads", ", ".join(f"{name} {size(count)}" for name, count in reads.items())),
        ("writes", size(sum(writes.values()))),
        ("floor", f"{size(total)}: {floor:,.1f} µs at {copy:,.0f} GB/s, the speed of a copy here now"),
        *(("launch", described(launch)) for launch in launches),
    ]
    if not launches:
        rows_.append(("launch", "none: torch operations"))
    if taken == "triton" and device == "cpu":
        rows_.append(("time", "not measured: the interpreter runs the kernels"))
    else:
        us = timer.us(function)
        rows_.append(("time", f"{us:,.1f} µs with cold caches, {100 * floor / us:.0f} % of copy"))
    for name, text in rows_:
        print(f"{name:<8}{text}")  # noqa: T201
    return 0
