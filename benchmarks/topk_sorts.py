# ruff: noqa
"""Best-first selection of 2048: the sort by a network that keeps frequent exchanges within threads, beside main.

    python select_gpu.py --new FOLDER/src --old src [--out record.json]

Kernels are compiled by processes side by side; then one process times the new sources with several numbers of warps of
the sort, and one the old sources. Each cell: µs in a CUDA graph, cold L2, median of 11; "exact" compares 600 rows with
a stable sort: normal scores, a few values only, zeros of both signs and NaN.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CELLS = [(4096, 32768), (8192, 8192), (16384, 16384), (8192, 16384)]
FEW = [(64, 131072), (64, 32768), (2048, 131072), (64, 8192)]
K = 2048
# warps of the sort where rows are many, and registers a thread (0: as they come)
NEW = {
    "2 warps": (2, 0),
    "4 warps": (4, 0),
    "4 warps, 128": (4, 128),
    "8 warps": (8, 0),
    "8 warps, 80": (8, 80),
    "16 warps": (16, 0),
}
DRY = os.environ.get("TRITON_INTERPRET") == "1"


def setup(variant):
    """Return the call for one variant: f(scores, k, sorted) → (values, indices)."""
    from onepass.ops.topk import kernels_select as ks
    from onepass.ops.topk import plan

    if variant in NEW:
        warps, registers = NEW[variant]
        plan.SORT_PER_WARP = K // warps
        if not hasattr(ks, "launch_as_it_is"):
            ks.launch_as_it_is = ks.launch

        def launch(kernel, *args, **options):
            many = args[0][0] > 528 and options.get("num_warps") == warps
            if registers and kernel is ks.sort_kernel and many:
                options["maxnreg"] = registers
            ks.launch_as_it_is(kernel, *args, **options)

        ks.launch = launch

    def call(s, k, is_sorted):
        found = ks.select(ks.Rows(s, None, None, None, True), k, is_sorted, None, True)
        return found.values, found.indices

    return call


def check(call, n, dtype, k):
    import torch

    torch.manual_seed(1)
    rows = 6 if DRY else 600
    s = torch.randn(rows, n, device="cpu" if DRY else "cuda")
    third = rows // 3
    s[third : 2 * third] = (s[third : 2 * third] * 4).round() / 4
    s[2 * third :] = s[2 * third :].relu() * torch.where(torch.rand_like(s[2 * third :]) > 0.5, 1.0, -1.0)
    s[-2:, ::9] = float("nan")
    s[-1, n // 4 :] = -torch.inf
    s = s.to(dtype)
    key = torch.where(s.isnan(), float("nan"), s.float() + 0.0)
    sorted_, order = key.sort(dim=-1, descending=True, stable=True)
    order = torch.where(sorted_ == -torch.inf, -1, order)[:, :k]
    right = torch.where(order < 0, torch.full_like(s[:, :k], -torch.inf), s.gather(1, order.clamp(min=0)))
    by_index = torch.where(order < 0, n, order).sort(-1).values
    good = True
    for is_sorted, expected in ((True, order), (False, torch.where(by_index == n, -1, by_index))):
        values, indices = call(s, k, is_sorted)
        right = torch.where(expected < 0, torch.full_like(s[:, :k], -torch.inf), s.gather(1, expected.clamp(min=0)))
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        same = (values.view(bits) == right.view(bits)) | (values.isnan() & right.isnan())
        good = good and bool(torch.equal(indices, expected)) and bool(same.all())
    return good


def timed(f, flush):
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    times = []
    for _ in range(12):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return round(statistics.median(times[1:]), 1)


def kernels(f):
    """µs of each kernel of one eager call, by torch's profiler, or what it says instead."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            f()
            torch.cuda.synchronize()
        return {e.key[:40]: round(e.device_time_total, 1) for e in found.key_averages() if e.device_time_total > 0}
    except Exception as error:
        return str(error)[:80]


def worker(which, variants, warm):
    import torch

    dtypes = (torch.float32, torch.bfloat16)
    if warm:
        for variant in variants:
            call = setup(variant)
            for rows, n in {(600, n) for _, n in CELLS} | {(64, n) for _, n in FEW} | {(600, 131072)}:
                for dtype in dtypes:
                    s = torch.randn(rows, n, device="cuda").to(dtype)
                    for is_sorted in (True, False):
                        call(s, K, is_sorted)
        torch.cuda.synchronize()
        return
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for dtype in dtypes:
        for rows, n in CELLS + FEW:
            few = (rows, n) in FEW
            s = torch.randn(rows, n, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
            cell = {"which": which, "rows": rows, "cols": n, "dtype": str(dtype)[6:]}
            if which == "old":
                for is_sorted in (True, False):
                    name = "torch sorted" if is_sorted else "torch unsorted"
                    print(
                        json.dumps({**cell, "what": name, "us": timed(lambda: s.topk(K, sorted=is_sorted), flush)}),
                        flush=True,
                    )
            for variant in variants:
                if few and variant not in ("4 warps", "8 warps", "main"):
                    continue
                call = setup(variant)
                exact = check(call, n, dtype, K)
                for is_sorted in (True, False):
                    us = timed(lambda: call(s, K, is_sorted), flush)
                    split = {} if few or variant not in ("4 warps", "main") else kernels(lambda: call(s, K, is_sorted))
                    what = f"{variant}, {'sorted' if is_sorted else 'by index'}"
                    print(json.dumps({**cell, "what": what, "us": us, "exact": exact, "kernels": split}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--new")
    parser.add_argument("--old")
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", default="")
    parser.add_argument("--variants", default="")
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.variants.split(";"), args.warm)
        return
    began = time.time()

    def start(which, variants, *more):
        src = os.path.abspath(args.new if which == "new" else args.old)
        environment = {**os.environ, "PYTHONPATH": src, "TRITON_CACHE_DIR": "/tmp/select_cache"}
        command = [
            sys.executable,
            os.path.abspath(__file__),
            "--worker",
            which,
            "--variants",
            ";".join(variants),
            *more,
        ]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    warm = [start("new", [name], "--warm") for name in NEW] + [start("old", ["main"], "--warm")]
    for process in warm:
        process.communicate()
    print(f"compiled after {time.time() - began:.0f} s; codes {[p.returncode for p in warm]}", flush=True)
    rows = []
    for which, variants in (("old", ["main"]), ("new", list(NEW))):
        process = start(which, variants)
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                if args.out:
                    with open(args.out, "w") as file:
                        json.dump({"how": __doc__, "rows": rows}, file, indent=1)
        process.wait()
        print(f"{which}: code {process.returncode} after {time.time() - began:.0f} s", flush=True)
    table = {}
    for row in rows:
        table.setdefault((row["dtype"], row["rows"], row["cols"]), {})[row["what"]] = row
    for cell, found in table.items():
        print(*cell)
        for what, row in found.items():
            print(
                f"  {what:28}{row['us']:9.1f}  {'' if 'exact' not in row else 'exact' if row['exact'] else 'WRONG'}  {row.get('kernels', '')}"
            )


if __name__ == "__main__":
    main()
