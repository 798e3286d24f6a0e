"""One token after a long text: bytes kept and milliseconds per token of causal routed blocks, beside dense ones.

    python -m benchmarks.decoding --json benchmarks/results/h200/raw/decoding.json      on a GPU: 8 k and 64 k tokens
    python -m benchmarks.decoding --device cpu --tokens 1024 --dim 128                   a size that a CPU takes

Both models have the same width, blocks and heads. The dense one attends to all tokens (torch's
scaled_dot_product_attention over keys and values of every token) and runs a 4× feed-forward; the routed one has
k = 1/16, k_kv = 1/8. A prompt of random tokens fills both caches, then STEPS tokens are timed, in turns of one model
and the other. Medians; a step ends when the device is done.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from onepass.core import files
from onepass.core.about import device_name, versions
from onepass.nn import RMSNorm, RoutedBlock
from onepass.nn.cache import BACKENDS
from onepass.nn.feed_forward import FeedForward
from onepass.ops.span_attention.op_rotary import rotary

STEPS, TURNS = 32, 3


class DenseBlock(nn.Module):
    """Pre-norm attention over all earlier tokens with rotary positions, then a 4× feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.feed_forward = heads, RMSNorm(dim), FeedForward(dim, 4 * dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def run(self, x: Tensor, cache: Tensor, position: int) -> Tensor:
        """Return the outputs (batch, n, dim) of tokens that follow `position` others; their keys and values are kept.

        cache: (2, batch, tokens, heads, width).
        """
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        n, places = x.shape[1], torch.arange(position, position + x.shape[1], device=x.device)
        cache[0, :, position : position + n], cache[1, :, position : position + n] = rotary(k, places), v
        keys, values = (t.transpose(1, 2) for t in cache[:, :, : position + n])
        # as the routed model's steps
        with sdpa_kernel(BACKENDS):
            y = F.scaled_dot_product_attention(rotary(q, places).transpose(1, 2), keys, values, is_causal=n > 1)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


def routed(model: nn.ModuleList, prompt: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """Read a prompt; return a step, and the bytes kept per sequence."""
    caches = [block.new_cache(len(prompt), prompt.shape[1] + STEPS * TURNS + 1) for block in model]  # type: ignore[operator]
    x = prompt
    for block, cache in zip(model, caches, strict=True):
        x = block.prefill(x, cache)  # type: ignore[operator]

    def step(x: Tensor) -> Tensor:
        for block, cache in zip(model, caches, strict=True):
            x = block.step(x, cache)  # type: ignore[operator]
        return x

    return step, sum(cache.nbytes for cache in caches) // len(prompt)


def dense(model: nn.ModuleList, prompt: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """Read a prompt; return a step, and the bytes kept per sequence."""
    batch, position, dim = prompt.shape
    heads = model[0].heads  # type: ignore[union-attr]
    room = position + STEPS * TURNS + 1
    caches = [prompt.new_zeros(2, batch, room, heads, dim // heads) for _ in model]  # type: ignore[operator]
    x = prompt
    for block, cache in zip(model, caches, strict=True):
        x = block.run(x, cache, 0)  # type: ignore[operator]

    def step(x: Tensor) -> Tensor:
        nonlocal position
        x = x[:, None]
        for block, cache in zip(model, caches, strict=True):
            x = block.run(x, cache, position)  # type: ignore[operator]
        position += 1
        return x[:, 0]

    return step, sum(cache[:, :, :position].nbytes for cache in caches) // batch


def measure(
    device: str, dtype: torch.dtype, tokens: int, dim: int, heads: int, blocks: int, batch: int
) -> dict[str, object]:
    """Return bytes per sequence and milliseconds per step of both models."""
    torch.manual_seed(0)
    models = {
        "routed": nn.ModuleList(
            RoutedBlock(dim, 1 / 16, heads=heads, dim_head=dim // heads, window=128, causal=True) for _ in range(blocks)
        ),
        "dense": nn.ModuleList(DenseBlock(dim, heads) for _ in range(blocks)),
    }
    prompt = torch.randn(batch, tokens, dim, device=device, dtype=dtype)
    steps, kept = {}, {}
    for name, model in models.items():
        steps[name], kept[name] = (routed if name == "routed" else dense)(model.to(device, dtype).eval(), prompt)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, step in steps.items():
            for _ in range(STEPS):
                x = torch.randn(batch, dim, device=device, dtype=dtype)
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                step(x)
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(1e3 * (time.perf_counter() - began))
    record: dict[str, object] = {
        "tokens": tokens, "dim": dim, "heads": heads, "blocks": blocks, "batch": batch, "dtype": str(dtype)[6:],
    }  # fmt: skip
    for name in models:
        record |= {f"{name} bytes": kept[name], f"{name} ms": round(statistics.median(times[name]), 3)}
    return record


@torch.no_grad()
def main() -> int:
    """Measure every length and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536], help="lengths of the prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the records")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    records = []
    for tokens in args.tokens:
        for batch in args.batch:
            record = measure(args.device, dtype, tokens, args.dim, args.dim // 64, args.blocks, batch)
            records.append(record)
            print(
                f"{tokens:6,} tokens, batch {batch}: kept {record['routed bytes']:,} of {record['dense bytes']:,} "
                f"bytes, {record['routed ms']} ms a token, dense {record['dense ms']} ms", flush=True,
            )  # fmt: skip
    if args.json:
        about = {
            "device": device_name(torch.device(args.device)), "threads": torch.get_num_threads(),
            "versions": versions(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        content = {**about, "steps": STEPS, "turns": TURNS, "records": records}
        files.write(args.json, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
