"""One token after a long text: milliseconds, kernels and bytes of causal blocks, beside the same in torch.

    python -m benchmarks.decoding --json benchmarks/results/h100/raw/decoding.json      on a GPU: 2 k to 64 k tokens
    python -m benchmarks.decoding --prefill                                  prompts alone, beside the forward alone
    python -m benchmarks.decoding --device cpu --tokens 1024 --dim 128               a size that a CPU takes

All models have the same width, heads, embedding, head and number of blocks, take the likeliest token, and on a GPU run
one CUDA graph per token. "windows" are `TransformerBlock`s with windows of 256, every fourth global; "experts" have 16
experts of 2·dim beside, 2 a token; "routed" has k = 1/16, k_kv = 1/8 and windows of 256. These read a prompt of random
tokens and write on with growing lengths; first tokens of windows are among those timed. Torch's rivals, "dense" and
"torch windows", have a 4× feed-forward and attend to exactly the tokens before (of windows 1.5·256, the mean), without
norms of heads, by the fastest of torch's attentions, in a cache of random numbers: a graph for one length, of no use
for the next. The floors are the bytes that have to be read over the bandwidth of a copy.
Prompts are timed one by one, of one length again and again, and "new" of lengths that were not seen before.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.case import graphed
from onepass.core.about import device_name, versions
from onepass.nn import Decoder, RMSNorm, RoutedBlock, TransformerBlock
from onepass.nn.routed import FeedForward
from onepass.ops.span_attention.op import rotary
from onepass.train.commands import files

STEPS, TURNS, VOCABULARY, K, WINDOW, EXPERTS = 64, 3, 256, 1 / 16, 256, 16
ATTENTIONS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class DenseBlock(nn.Module):
    """Pre-norm attention over all earlier tokens with rotary positions, then a 4× feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.feed_forward = heads, RMSNorm(dim), FeedForward(dim, 4 * dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """Return the outputs (batch, 1, dim) of the last token; its cache is (2, batch, n, heads, width)."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        turned = rotary(qkv[:, :, :2].flatten(2, 3), position)
        cache[0, :, -1], cache[1, :, -1] = turned[:, 0, self.heads :], qkv[:, 0, 2]
        q, k, v = (t.transpose(1, 2) for t in (turned[:, :, : self.heads], *cache))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


class Ends(nn.Module):
    """Embedding and head, of both models."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY)


def dense(
    blocks: nn.ModuleList, ends: Ends, batch: int, tokens: int, window: int | None = None
) -> tuple[Callable[[], object], str, int]:
    """Return a step, by the fastest attention, its name, and the cache's bytes a sequence; each fourth block global."""
    weight = ends.head.weight
    heads, dim = blocks[0].heads, weight.shape[1]  # type: ignore[union-attr]
    lengths = [
        tokens + 1 if window is None or i % 4 == 3 else min(tokens + 1, window * 3 // 2) for i in range(len(blocks))
    ]
    caches = [
        torch.randn(2, batch, n, heads, dim // heads, device=weight.device, dtype=weight.dtype)
        for n in lengths  # type: ignore[operator, arg-type]
    ]
    token = torch.randint(VOCABULARY, (batch, 1), device=weight.device)
    position = torch.full((1,), tokens, device=weight.device)

    def step() -> None:
        x = ends.embedding(token)
        for block, cache in zip(blocks, caches, strict=True):
            x = block(x, cache, position)
        token.copy_(ends.head(x).argmax(-1))

    cache_bytes = sum(cache.nbytes for cache in caches) // batch
    if not weight.is_cuda:
        return step, "torch's choice", cache_bytes
    timed: list[tuple[float, str, Any]] = []
    for name, backend in ATTENTIONS.items():
        try:
            with sdpa_kernel(backend):
                run = graphed(lambda: step).build()
        except RuntimeError:
            continue
        timed.append((milliseconds(run, weight.device, 8), name, run))
    _, name, run = min(timed, key=lambda one: one[0])
    return run, name, cache_bytes


def milliseconds(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Return the mean of `steps` steps, host and device."""
    step()
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return 1e3 * (time.perf_counter() - began) / steps


def prompts(runs: dict[str, Callable[[Tensor], object]], prompt: Tensor) -> dict[str, float]:
    """Return each run's median time for a prompt, in ms, and for prompts of lengths that it has not had before."""
    times: dict[str, list[float]] = {f"{prefix}{name} ms": [] for prefix in ("", "new ") for name in runs}
    # kernels are compiled in the first turn, replays begin in the third
    for turn in range(3 + 2 * TURNS):
        for i, (name, run) in enumerate(runs.items()):
            for prefix, tokens in (("", prompt), ("new ", prompt[:, 1 + turn * len(runs) + i :].contiguous())):
                _wait(prompt.device)
                began = time.perf_counter()
                run(tokens)
                _wait(prompt.device)
                times[f"{prefix}{name} ms"].append(1e3 * (time.perf_counter() - began))
    return {name: round(sorted(t[3:])[TURNS], 2) for name, t in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernels(step: Callable[[], object]) -> int | None:
    """Return how many kernels, copies included, a step runs on the GPU; None: the profiler saw none."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(events) or None


def floor_bytes(blocks: nn.ModuleList, batch: int, tokens: int) -> int:
    """Return the bytes that a token has to read: weights, two windows or all keys, and what chosen tokens attend to."""
    total = 0.0
    for name, p in blocks.named_parameters():
        # a heavy branch's weights, and an expert's, are read if at least one sequence's token chose them
        share = K if ".heavy." in name else 2 / EXPERTS if p.dim() == 3 else 1.0
        total += p.nbytes * (1 - (1 - share) ** batch)
    for block in blocks:
        attention: Any = block.attention
        keys = 1.5 * WINDOW if attention.window else tokens
        keys += K * 2 * K * tokens if isinstance(block, RoutedBlock) else 0
        total += keys * batch * attention.dim * 2 * next(attention.parameters()).element_size()
    return int(total)


def models(args: argparse.Namespace) -> tuple[Ends, nn.ModuleList, dict[str, nn.ModuleList]]:
    """Return embedding and head, the blocks of torch's rivals, and ours by name."""
    torch.manual_seed(0)
    dim, count, block = args.dim, range(args.blocks), partial(TransformerBlock, args.dim, causal=True)
    heads, windows = dim // 64, [None if i % 4 == 3 else WINDOW for i in count]
    with torch.device(args.device):
        ends, rival = Ends(dim), nn.ModuleList(DenseBlock(dim, heads) for _ in count)
        ours: dict[str, list[nn.Module]] = {
            "routed": [RoutedBlock(dim, K, heads=heads, window=WINDOW, causal=True) for _ in count],
            "windows": [block(window=w) for w in windows],
            "experts": [block(window=w, num_experts=EXPERTS, hidden_dim=2 * dim) for w in windows],
        }
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    models_by_name = {name: nn.ModuleList(blocks).to(dtype).eval() for name, blocks in ours.items()}
    return ends.to(dtype).eval(), rival.to(dtype).eval(), models_by_name


def measure(
    args: argparse.Namespace, parts: tuple[Ends, nn.ModuleList, dict[str, nn.ModuleList]], tokens: int, batch: int,
    bandwidth: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the caches' bytes of a sequence, and the times of prompts and steps."""
    ends, rival, ours = parts
    device, dtype = ends.head.weight.device, ends.head.weight.dtype
    record: dict[str, Any] = {
        "tokens": tokens, "dim": args.dim, "heads": args.dim // 64, "blocks": args.blocks, "batch": batch,
        "dtype": str(dtype)[6:],
    }  # fmt: skip
    prompt, steps = torch.randint(VOCABULARY, (batch, tokens), device=device), {}
    for name, blocks in ours.items():
        decoder = Decoder(
            blocks, ends.embedding, ends.head, batch=batch, max_tokens=tokens + STEPS * (TURNS + 1) + 8, temperature=0
        )

        def forward(prompt: Tensor, blocks: nn.ModuleList = blocks) -> None:
            x = ends.embedding(prompt)
            for block in blocks:
                x = block(x)
            ends.head(x[:, -1:])

        if name == "routed":
            record |= prompts({"forward": forward, "prefill": decoder.prefill}, prompt)
        if args.prefill:
            return record
        decoder.prefill(prompt)
        steps[name] = decoder._advance
        # per sequence, for as many tokens as the dense cache holds
        record[f"{name} bytes"] = sum(b.new_cache(1, tokens + 1).nbytes for b in blocks)  # type: ignore[operator]
        record[f"{name} floor ms"] = (
            round(1e3 * floor_bytes(blocks, batch, tokens) / bandwidth, 4) if bandwidth else None
        )
    for name, window in (("dense", None), ("torch windows", WINDOW)):
        steps[name], record[f"{name} attention"], record[f"{name} bytes"] = dense(rival, ends, batch, tokens, window)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            times[name].append(milliseconds(step, device, STEPS - 1))
    if device.type == "cuda":
        record |= {f"{name} kernels": kernels(step) for name, step in steps.items()}
    return record | {f"{name} ms": round(sorted(t)[len(t) // 2], 4) for name, t in times.items()}


def writing(device: str) -> float:
    """Return how many bytes a second a model of the training job's gpu preset writes after a prompt of 1,000."""
    from onepass.train.config import build
    from onepass.train.model import new

    options = {"seed": 0, "device": device, "precision": "fp32", "threads": 1, "data": "", "paths": ()}
    model = new(build("gpu", task="causal", **options)).to(device).eval()
    count = 1024 if device == "cuda" else 64
    decoder, prompt = model.decoder(1, 2100), torch.randint(256, (1, 1000), device=device)
    decoder.generate(prompt, 2)
    began = time.perf_counter()
    decoder.generate(prompt, count)
    return round(count / (time.perf_counter() - began), 1)


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    """Measure every length and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768, 65536], help="of the prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the records")
    parser.add_argument("--prefill", action="store_true", help="measure prompts alone")
    args = parser.parse_args(argv)
    about: dict[str, Any] = {
        "device": device_name(torch.device(args.device)), "threads": torch.get_num_threads(), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "steps": STEPS, "turns": TURNS,
    }  # fmt: skip
    bandwidth = 0.0
    if args.device == "cuda" and not args.prefill:
        source = torch.randn(2**28, device="cuda")
        target = torch.empty_like(source)
        bandwidth = 2e3 * source.nbytes / milliseconds(lambda: target.copy_(source), source.device, 10)
        del source, target
        about["copy TB/s"] = round(bandwidth / 1e12, 3)
        print(about)
    records, parts = [], models(args)
    for tokens in args.tokens:
        for batch in args.batch:
            records.append(measure(args, parts, tokens, batch, bandwidth))
            print(records[-1], flush=True)
            if args.json:
                files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    if args.prefill:
        return 0
    about["bytes a second"] = {device: writing(device) for device in dict.fromkeys((args.device, "cpu"))}
    print(about["bytes a second"])
    if args.json:
        files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
