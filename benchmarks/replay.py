"""What replay saves: host time of eager calls without replay, with a loop over the record, and with its program.

    python benchmarks/replay.py --out benchmarks/results/h200/replay.json

Each call is enqueued ten times between two waits; the number is the median wall time until it returns, in µs. The
three ways take turns, round after round, so that a drifting clock changes all of them alike. `loop` stands here only:
it is what `core/launch/replay.py` would do without generating a program.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.core.launch import replay
from onepass.core.launch.compiled import launch_arguments

WAYS = ("none", "loop", "program")


def loop_plan(recorder: Any, outs: list[int | None], several: bool) -> Callable[[tuple[Any, ...]], Any]:
    """Replay by a loop over what was recorded."""
    device, n_args, launches = recorder.device, recorder.n_args, recorder.launches
    places = {place[0] for _, _, tensors, _ in launches for place in tensors if place is not None}
    inputs = [place for place in sorted(places) if place < n_args]
    first = launches[0][0]
    index, get_device, get_stream = device.index, first.get_device, first.get_stream
    enter, leave = first.hooks.launch_enter_hook, first.hooks.launch_exit_hook
    make = {"empty": replay._empty_on(device), "zeros": replay._zeros_on(device)}
    allocations = [
        (i, make[kind], layout, i in places) for i, (kind, layout) in enumerate(recorder.allocations, n_args)
    ]
    size = n_args + len(recorder.allocations)

    def run(args: tuple[Any, ...]) -> Any:
        address: list[Any] = [None] * size
        misaligned = 0
        for i in inputs:
            pointer = args[i].data_ptr()
            address[i] = pointer
            misaligned |= pointer
        if misaligned & 15 or get_device() != index or enter.calls or leave.calls:
            return NotImplemented
        made: list[Any] = [None] * size
        for i, allocate, layout, used in allocations:
            made[i] = tensor = allocate(*layout)
            if used:
                address[i] = tensor.data_ptr()
        stream = get_stream(index)
        for entry, grid, tensors, scalars in launches:
            pointers = [None if place is None else address[place[0]] + place[1] for place in tensors]
            entry.run(*launch_arguments(grid, stream, entry.head, pointers, scalars, entry.packed))
        found = [None if i is None else made[i] for i in outs]
        return tuple(found) if several else found[0]

    return run


def _calls() -> dict[str, Callable[[], Any]]:
    """Small tensors: the host decides. A routed layer replays stretches of several launches."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    x, w, b = leaf(64, 1024), leaf(1024), leaf(1024)
    y, dy = onepass.layer_norm(x, w, b), torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(64, 1024, device="cuda")
    feed_forward = onepass.nn.RoutedFeedForward(256, k=64).cuda().bfloat16()
    block = onepass.nn.RoutedBlock(256, k=64, heads=4, dim_head=64, window=128).cuda().bfloat16()
    tokens = leaf(2, 1024, 256)

    def without_gradients(call: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(call)

    return {
        "layer_norm forward, no gradients": without_gradients(lambda: onepass.layer_norm(x, w, b)),
        "layer_norm forward": lambda: onepass.layer_norm(x, w, b),
        "layer_norm backward": lambda: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True),
        "weighted_sum forward": without_gradients(lambda: onepass.weighted_sum(x, w)),
        "soft_topk forward": without_gradients(lambda: onepass.soft_topk(scores, 64)),
        "routed feed-forward, both passes": lambda: feed_forward(tokens).sum().backward(),
        "routed block, both passes": lambda: block(tokens).sum().backward(),
    }


def _time(call: Callable[[], Any], calls: int) -> float:
    times = []
    for i in range(calls):
        if i % 10 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append(1e-3 * (time.perf_counter_ns() - start))
    return statistics.median(times)


def measure(calls: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per call: µs for each way, and how many launches a replay covers."""
    program, on_gpu = replay._plan, replay._on_gpu
    prepared: dict[str, Callable[[], None]] = {
        "none": lambda: setattr(replay, "_on_gpu", lambda x: False),
        "loop": lambda: (setattr(replay, "_plan", loop_plan), setattr(replay, "_on_gpu", on_gpu))[0],
        "program": lambda: (setattr(replay, "_plan", program), setattr(replay, "_on_gpu", on_gpu))[0],
    }
    rows = []
    for name in _calls():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        results: dict[str, list[torch.Tensor]] = {}
        for turn in range(rounds):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                prepared[way]()
                _forget()
                torch.manual_seed(0)
                call = _calls()[name]
                for _ in range(8):
                    out = call()
                found[way].append(_time(call, calls))
                outs = out if isinstance(out, tuple) else (out,)
                results[way] = [t.detach().clone() for t in outs if isinstance(t, torch.Tensor)]
        for way in WAYS[1:]:
            for a, e in zip(results[way], results["none"], strict=True):
                torch.testing.assert_close(a, e, rtol=0, atol=0)
        rows.append({"call": name} | {way: round(statistics.median(found[way]), 2) for way in WAYS}
                    | {"spread": {way: [round(min(t), 2), round(max(t), 2)] for way, t in found.items()}})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    replay._plan, replay._on_gpu = program, on_gpu
    return rows


def _forget() -> None:
    """Empty every memory of layouts, so that the next calls record anew."""
    import gc
    import types

    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__qualname__ == "replayed.<locals>.run":
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            for name in ("plans", "seen"):
                cells[name].cell_contents.clear()


def main() -> None:
    """Print a row per call; write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="timed calls of a way in a round (default 500)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default 5)")
    parser.add_argument("--out", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here; only CUDA calls are replayed")
    torch.set_num_threads(1)
    header = {"header": True, "torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "unit": "host µs"}
    rows = measure(args.calls, args.rounds)
    if args.out:
        args.out.write_text(json.dumps([header, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
