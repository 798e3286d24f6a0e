"""Sparse causal attention: an indexer scores all earlier tokens; attention runs on the k that onepass.topk chooses.

A byte model with full attention is trained first. Each arm goes on from it alone, with the same batches: `full`; the k
last tokens (`window`); the k that an indexer chooses, which stays `untrained`, or learns by distillation (`distil`: KL
to full attention's weights, which are computed for it), by the language model's loss through the `gates`, or by `both`.

Run: python examples/sparse_attention.py --steps 20      --size gpu (16384 tokens, k 512, bf16) has not been run yet
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.nn import RMSNorm
from onepass.optim import Lion
from onepass.train import data

ARMS = ("full", "window", "untrained", "distil", "gates", "both")
SIZES = {
    "cpu": {"seq": 512, "batch": 4, "k": 32, "dim": 64, "heads": 4, "blocks": 2, "steps": 400, "lr": 1e-3},
    "gpu": {"seq": 16384, "batch": 1, "k": 512, "dim": 1024, "heads": 16, "blocks": 8, "steps": 2000, "lr": 1e-4},
}
INDEX_HEADS, INDEX_WIDTH, CHUNK, HELD_OUT = 4, 16, 512, 64


def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q (batch, n, heads, width) and k (batch, n, 1, width), normed and rotated by their positions."""
    speeds = 10000.0 ** -torch.linspace(0, 1, q.shape[-1] // 2 + 1, device=q.device)[:-1]
    angles = torch.arange(float(q.shape[1]), device=q.device)[:, None] * speeds
    return onepass.qk_norm_rope(q, k, cos=angles.cos(), sin=angles.sin())


class SparseAttention(nn.Module):
    """Causal attention to k tokens a query; its heads share keys and values, so that one gather serves them all."""

    def __init__(self, dim: int, heads: int, k: int, arm: str) -> None:
        super().__init__()
        self.heads, self.width, self.k, self.arm = heads, dim // heads, k, arm
        self.qkv, self.out = nn.Linear(dim, dim + 2 * self.width, bias=False), nn.Linear(dim, dim, bias=False)
        self.indexer = nn.Linear(dim, (INDEX_HEADS + 1) * INDEX_WIDTH + INDEX_HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the distillation loss, and full attention's weight on (what was chosen, the k largest)."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).split((self.heads, 1, 1), -2)
        q, k = normed(q, k)
        if self.arm == "full":
            heads = (t.transpose(1, 2).expand(-1, self.heads, -1, -1) for t in (q, k, v))
            y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
            return self.out(y.flatten(2)), x.new_zeros(()), x.new_ones(2)
        # detached: what trains the indexer trains nothing else
        index, weights = self.indexer(x.detach()).split(((INDEX_HEADS + 1) * INDEX_WIDTH, INDEX_HEADS), -1)
        index_q, index_k = normed(*index.unflatten(-1, (-1, INDEX_WIDTH)).split((INDEX_HEADS, 1), -2))
        found = []
        for first in range(0, n, CHUNK):
            rows = slice(first, first + CHUNK)
            parts = q[:, rows], k[:, :, 0], v[:, :, 0], index_q[:, rows], index_k[:, :, 0], weights[:, rows], first
            # backward computes a chunk of a long row again; topk then chooses the same tokens, ties included
            again = n > CHUNK and self.training
            found.append(checkpoint(self.attend, *parts, use_reentrant=False) if again else self.attend(*parts))
        y, loss, mass = zip(*found, strict=True)
        rows = b * max(n - self.k, 1)  # the first k queries see no more than k tokens
        return self.out(torch.cat(y, 1).flatten(2)), torch.stack(loss).sum() / (b * n), torch.stack(mass).sum(0) / rows

    def attend(self, q, k, v, index_q, index_k, index_weights, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from the queries at first, first + 1, …; the loss and the weights are sums over them."""
        (b, n, _), scale = k.shape, self.width**-0.5
        place = torch.arange(first, first + q.shape[1], device=q.device)
        if self.arm == "window":
            indices = (place[:, None] - torch.arange(self.k, device=q.device)).clamp_min(-1).expand(b, -1, -1)
            gates = torch.ones_like(indices, dtype=q.dtype)
        else:
            # s_tj = Σ_h w_th·ReLU(q_th·k_j), the lightning indexer of DeepSeek-V3.2
            products = torch.einsum("bqhd,bkd->bqhk", index_q, index_k).relu() / math.sqrt(INDEX_WIDTH * INDEX_HEADS)
            scores = torch.einsum("bqhk,bqh->bqk", products, index_weights)
            learns = scores if self.arm in ("gates", "both") else scores.detach()
            options = {"lengths": place + 1, "sorted": False, "eps": 0.3, "kind": "sigmoid"}
            _, indices, gates = onepass.topk(learns, self.k, **options)
        missing, at = indices < 0, indices.clamp_min(0)
        flat = at + n * torch.arange(b, device=q.device)[:, None, None]
        logits = torch.einsum("bqhd,bqkd->bqhk", q, F.embedding(flat, k.flatten(0, 1))) * scale
        # inside the softmax a gate's gradient is what the loss would gain by less of this token
        logits = logits + gates.masked_fill(missing, 1).log()[:, :, None]
        attention = logits.masked_fill(missing[:, :, None], -math.inf).softmax(-1).to(v.dtype)
        y = torch.einsum("bqhk,bqkd->bqhd", attention, F.embedding(flat, v.flatten(0, 1)))
        loss, distils = y.new_zeros((), dtype=torch.float32), self.arm in ("distil", "both")
        if self.training and not distils:
            return y, loss, loss.expand(2)
        later = torch.arange(n, device=q.device) > place[:, None]
        with torch.no_grad():
            full = (torch.einsum("bqhd,bkd->bhqk", q, k) * scale).masked_fill(later, -math.inf)
            full = full.softmax(-1, dtype=torch.float32).mean(1)
            chosen, best = full.gather(-1, at).masked_fill(missing, 0), full.topk(min(self.k, n)).values
            mass = torch.stack([part[:, place >= self.k].sum() for part in (chosen, best)])
        if distils:
            guess = scores.masked_fill(later, torch.finfo(scores.dtype).min).log_softmax(-1, dtype=torch.float32)
            loss = F.kl_div(guess, full, reduction="sum")
        return y, loss, mass


class Model(nn.Module):
    """Bytes to logits of the next byte, the sum of the layers' distillation losses, and the mean of their weights."""

    def __init__(self, arm: str, *, dim: int, heads: int, blocks: int, k: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(data.VOCABULARY, dim), RMSNorm(dim), nn.Linear(dim, 256)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            wide = nn.Sequential(RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            self.blocks.append(nn.ModuleList([RMSNorm(dim), SparseAttention(dim, heads, k, arm), wide]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, loss, mass = self.embedding(tokens), 0, 0
        for norm, attention, wide in self.blocks:
            y, more, held = attention(norm(x))
            x, loss, mass = x + y, loss + more, mass + held / len(self.blocks)
            x = x + wide(x)
        return self.head(self.norm(x)), loss, mass


def run(model: Model, batch: data.Batch, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of a batch in nats, the distillation loss and the weights."""
    tokens, answers = (torch.from_numpy(part).to(device) for part in (batch.tokens, batch.bytes))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits, distillation, mass = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), answers.flatten()), distillation, mass


def train(
    model: Model, text: data.Corpus, seq: int, batch: int, steps: range, lr: float, seed: int, device: str
) -> float:
    """Train with Lion, the learning rate falling to a tenth; return the median of a step's milliseconds."""
    optimizer, times = Lion(model.train().parameters(), lr=lr, weight_decay=0.1), []
    for step in steps:
        started = time.perf_counter()
        optimizer.param_groups[0]["lr"] = lr * (1 - 0.9 * (step - steps[0]) / len(steps))
        loss, distillation, _ = run(model, data.training_batch(text.training, batch, seq, None, seed, step), device)
        (loss + distillation).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


@torch.no_grad()
def measure(model: Model, text: data.Corpus, seq: int, batch: int, device: str) -> list[float]:
    """Return bits per byte of held-out text, and full attention's weight on what is chosen and on the k largest."""
    held_out = list(data.validation_batches(text.validation, batch, seq, None, HELD_OUT))
    found = [run(model.eval(), part, device) for part in held_out]
    return [sum(x.item() for x in column) / len(found) for column in zip(*((l / math.log(2), *m) for l, _, m in found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="cpu", help="gpu has not been run yet")
    parser.add_argument("--steps", type=int, help="of full attention, then of each arm")
    parser.add_argument("--seeds", type=int, default=1, help="repeat everything with the seeds 0, 1, …")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    size = SIZES[args.size] | ({"steps": args.steps} if args.steps is not None else {})
    device = "cuda" if args.size == "gpu" else "cpu"
    if size["steps"] < 1 or args.seeds < 1 or (args.out and not args.out.parent.is_dir()):
        parser.error("--steps and --seeds must be at least 1, and the folder of --out must exist")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--size gpu needs a CUDA device")
    text, rows = data.load([]), []
    seq, batch, steps, lr = (size.pop(name) for name in ("seq", "batch", "steps", "lr"))
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        start = Model("full", **size).to(device)
        train(start, text, seq, batch, range(4 * steps), lr, seed, device)
        for arm in ARMS:
            model = Model(arm, **size).to(device)
            model.load_state_dict(start.state_dict())
            ms = train(model, text, seq, batch, range(4 * steps, 5 * steps), lr, seed, device)
            bits, chosen, best = measure(model, text, seq, batch, device)
            rows.append({"seed": seed, "arm": arm, "bits": bits, "ms": ms, "chosen": chosen, "best": best})
            print(
                f"{arm:9}  {bits:.3f} bits per byte  {ms:6.0f} ms a step  weight on chosen {chosen:.3f} of at most {best:.3f}"
            )
        if args.out:
            about = {
                "command": sys.argv,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "text": text.digest,
            }
            args.out.write_text(
                json.dumps({**about, "size": SIZES[args.size], "steps": steps, "rows": rows}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
