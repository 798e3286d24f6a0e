# ruff: noqa
"""topk where people use it: many rows beside torch.topk and a compiled group-max pre-pass; indexers' own selections;
a sparse autoencoder's step; kth_value; soft_topk in narrow rows beside softmax. Median µs, random data, every result checked.

    python users.py OUT.json
"""

import json, statistics, sys, time
import torch, triton
import onepass
from torch import nn

DEV = "cuda"
out = {
    "header": {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "how": __doc__,
        "timing": "CUDA graph with a cold L2 unless 'eager'",
    },
    "rows": [],
}
flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEV)
T0 = time.time()


def keep(**row):
    out["rows"].append(row)
    print(json.dumps(row), flush=True)
    json.dump(out, open(sys.argv[1], "w"), indent=1)


def med(run, n=11):
    times = []
    for _ in range(n):
        flush.zero_()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000)
    return round(statistics.median(times), 1)


def graph(f):
    st = torch.cuda.Stream()
    st.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(st):
        f()
        f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()
    return med(g.replay)


def copy_us(nbytes):
    a = torch.empty(nbytes // 4, device=DEV, dtype=torch.int32).random_()
    b = torch.empty_like(a)
    return graph(lambda: b.copy_(a)) / 2


def stable(s, k):
    return torch.sort(s, dim=-1, descending=True, stable=True).indices[:, :k]


def group_max(k, g=64):
    def f(s):
        r, n = s.shape
        groups = s.view(r, n // g, g).amax(-1).topk(k).indices
        at = (groups[..., None] * g + torch.arange(g, device=s.device)).flatten(1)
        v, i = s.gather(1, at).topk(k)
        return v, at.gather(1, i)

    return torch.compile(f)


CELLS = [
    (4096, 65536, 32),
    (8192, 131072, 64),
    (16384, 24576, 64),
    (4096, 16384, 32),
    (256, 128256, 50),
    (65536, 64, 8),
    (32768, 256, 8),
    (4096, 32768, 2048),
    (8192, 8192, 2048),
    (16384, 16384, 2048),
]


def many():
    for dtype in (torch.float32, torch.bfloat16):
        for r, n, k in CELLS:
            s = torch.randn(r, n, device=DEV).to(dtype)
            rows = s[:256]
            found = onepass.topk(s, k).indices[:256]
            row = {
                "what": "selection",
                "rows": r,
                "cols": n,
                "k": k,
                "dtype": str(dtype)[6:],
                "exact": bool(torch.equal(found, stable(rows, k))),
                "read": copy_us(s.nbytes),
                "onepass": graph(lambda: onepass.topk(s, k)),
                "torch.topk": graph(lambda: torch.topk(s, k)),
            }
            if k == 2048:
                found = onepass.topk(s, k, sorted=False).indices[:256]
                row["exact"] &= bool(torch.equal(found, stable(rows, k).sort(-1).values))
                row["onepass, by index"] = graph(lambda: onepass.topk(s, k, sorted=False))
                row["torch.topk, unsorted"] = graph(lambda: torch.topk(s, k, sorted=False))
            elif n % 64 == 0 and n > 4096:
                f = group_max(k)
                f(s)
                row["group max, torch.compile"] = graph(lambda: f(s))
            keep(**row)
            del s


def peak(f):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    r = f()
    torch.cuda.synchronize()
    return r, torch.cuda.max_memory_allocated() - base


def indexers():
    for dtype in (torch.float32, torch.bfloat16):
        for r, n, k in ((4096, 32768, 2048), (8192, 8192, 2048)):
            s = torch.randn(r, n, device=DEV).to(dtype)
            s[::3] = s[::3].relu()  # plateaus
            seen = torch.arange(1, r + 1, device=DEV).mul(n // r).clamp(max=n)
            cols = torch.arange(n, device=DEV)

            def tidy(i, count):
                i = torch.where(torch.arange(k, device=DEV) < count[:, None], i, n).sort(-1).values
                return torch.where(i == n, -1, i).int()

            def by_stable_sort():
                m = s.masked_fill(cols >= seen[:, None], -torch.inf)
                return tidy(m.sort(dim=-1, descending=True, stable=True).indices[:, :k], seen.clamp(max=k))

            def by_chunks():
                parts = []
                for a in range(0, r, 1024):
                    m = s[a : a + 1024].masked_fill(cols >= seen[a : a + 1024, None], -torch.inf)
                    parts.append(
                        tidy(
                            m.sort(dim=-1, descending=True, stable=True).indices[:, :k], seen[a : a + 1024].clamp(max=k)
                        )
                    )
                return torch.cat(parts)

            def by_topk():
                m = s.masked_fill(cols >= seen[:, None], -torch.inf)
                return tidy(m.topk(k, sorted=False).indices, seen.clamp(max=k))

            def ours():
                return onepass.topk(s, k, lengths=seen, sorted=False, index_dtype=torch.int32).indices

            want = by_stable_sort()
            for name, f in (
                ("stable sort", by_stable_sort),
                ("stable sort in chunks of 1024", by_chunks),
                ("torch.topk, sort of indices", by_topk),
                ("onepass", ours),
            ):
                got, bytes_ = peak(f)
                keep(
                    what="indexer",
                    rows=r,
                    cols=n,
                    k=k,
                    dtype=str(dtype)[6:],
                    way=name,
                    us=med(f, 5),
                    peak_mib=round(bytes_ / 2**20, 1),
                    equal=bool(torch.equal(got, want)),
                    timing="eager",
                )
            del s


class SAE(nn.Module):
    def __init__(self, dim, latents, k, way):
        super().__init__()
        self.k, self.way = k, way
        self.bias = nn.Parameter(torch.zeros(dim))
        self.encoder = nn.Parameter(nn.functional.normalize(torch.randn(dim, latents), dim=0))
        self.decoder = nn.Parameter(self.encoder.detach().t().clone())

    def forward(self, x):
        z = (x - self.bias) @ self.encoder
        values, at = (
            onepass.topk(z, self.k, sorted=False)[:2] if self.way == "onepass" else z.topk(self.k, sorted=False)
        )
        rows = (self.decoder[at] * values.relu()[..., None]).sum(1)
        return (x - self.bias - rows).square().mean()


def autoencoder():
    losses = {}
    for way in ("torch.topk", "onepass", "torch.topk", "onepass"):
        torch.manual_seed(0)
        with torch.device(DEV):
            m = SAE(4096, 65536, 32, way).bfloat16()
        x = torch.randn(8192, 4096, device=DEV, dtype=torch.bfloat16)

        def step():
            m.zero_grad()
            loss = m(x)
            loss.backward()
            return loss

        loss = float(step())
        step()
        keep(
            what="autoencoder step, forward and backward",
            dim=4096,
            latents=65536,
            k=32,
            tokens=8192,
            dtype="bfloat16",
            way=way,
            us=med(step, 7),
            loss=loss,
            timing="eager",
        )
        del m, x
        torch.cuda.empty_cache()


def others():
    for n, k in ((1 << 28, 262144),):
        s = torch.randn(n, device=DEV)
        right = bool(onepass.kth_value(s, k) == s.sort(descending=True).values[k - 1])
        keep(
            what="kth_value",
            cols=n,
            k=k,
            dtype="float32",
            read=copy_us(s.nbytes),
            onepass=med(lambda: onepass.kth_value(s, k), 7),
            exact=right,
            timing="eager",
        )
        del s
    for dtype in (torch.float32, torch.bfloat16):
        s = torch.randn(8, 1 << 20, device=DEV).to(dtype)
        for srt in (True, False):
            keep(
                what="selection",
                rows=8,
                cols=1 << 20,
                k=65536,
                dtype=str(dtype)[6:],
                order=srt,
                onepass=med(lambda: onepass.topk(s, 65536, sorted=srt), 7),
                **{"torch.topk": med(lambda: torch.topk(s, 65536, sorted=srt), 7)},
                timing="eager",
            )
    for r, n, k in ((65536, 64, 8), (32768, 256, 8)):
        for kind in ("capped_exp", "sigmoid"):
            s = torch.randn(r, n, device=DEV, requires_grad=True)
            gy = torch.randn(r, n, device=DEV)
            y, z = onepass.soft_topk(s, k, kind=kind), s.softmax(-1)
            keep(
                what="soft_topk",
                rows=r,
                cols=n,
                k=k,
                kind=kind,
                dtype="float32",
                copy=2 * copy_us(s.nbytes),
                forward=graph(lambda: onepass.soft_topk(s.detach(), k, kind=kind)),
                softmax=graph(lambda: s.detach().softmax(-1)),
                backward=med(lambda: torch.autograd.grad(y, s, gy, retain_graph=True), 21),
                softmax_backward=med(lambda: torch.autograd.grad(z, s, gy, retain_graph=True), 21),
                timing="forward in a graph, backward eager",
            )
    # topk's backward through soft_topk's
    for r, n, k in ((64, 32768, 2048), (4096, 1024, 64)):
        s = torch.randn(r, n, device=DEV, requires_grad=True)
        g = onepass.topk(s, k).gates
        gy = torch.randn(r, k, device=DEV)
        keep(
            what="topk backward of gates",
            rows=r,
            cols=n,
            k=k,
            dtype="float32",
            us=med(lambda: torch.autograd.grad(g, s, gy, retain_graph=True), 21),
            timing="eager",
        )


for part in (others, autoencoder, indexers, many):
    try:
        part()
    except Exception as e:
        keep(what=part.__name__, error=f"{type(e).__name__}: {e}"[:300])
    print(part.__name__, round(time.time() - T0), "s", flush=True)
