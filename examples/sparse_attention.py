"""Sparse causal attention: an indexer scores all earlier bytes; attention runs on the k that onepass.topk chooses.

A byte model with full attention is trained first. Each arm goes on from it alone, with the same batches: `full`; the k
last bytes (`window`); the k that an indexer chooses, which stays `untrained`, or learns by distillation (`distil`: KL
to full attention's weights, computed for it), by the language model's loss through the `gates`, or by `both`.

Run: python examples/sparse_attention.py --steps 20      --size gpu: 16384 bytes, k 512, bf16
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.nn import RMSNorm
from onepass.optim import Lion
from onepass.train import data
from onepass.train.commands.options import number

ARMS = ("full", "window", "untrained", "distil", "gates", "both")
SIZES = {  # sequences of bytes, learning rate, steps of an arm; then the model
    "cpu": ({"batch": 4, "seq": 512}, 1e-3, 400, {"dim": 64, "heads": 4, "blocks": 2, "k": 32}),
    "gpu": ({"batch": 1, "seq": 16384}, 1e-4, 2000, {"dim": 1024, "heads": 16, "blocks": 8, "k": 512}),
}
INDEX_HEADS, INDEX_WIDTH = 4, 16


def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Norm and rotate the heads of q (batch, n, heads, width) and k (batch, n, 1, width); return k without heads."""
    speeds = 10000.0 ** -torch.linspace(0, 1, q.shape[-1] // 2 + 1, device=q.device)[:-1]
    angles = torch.arange(float(q.shape[1]), device=q.device)[:, None] * speeds
    q, k = onepass.qk_norm_rope(q, k, cos=angles.cos(), sin=angles.sin())
    return q, k[:, :, 0]


class SparseAttention(nn.Module):
    """Causal attention to k tokens a query; heads share keys and values, so that one gather serves them all."""

    def __init__(self, dim: int, heads: int, k: int, arm: str) -> None:
        super().__init__()
        self.heads, self.width, self.k, self.arm = heads, dim // heads, k, arm
        self.qkv, self.out = nn.Linear(dim, dim + 2 * self.width, bias=False), nn.Linear(dim, dim, bias=False)
        self.indexer = nn.Linear(dim, (INDEX_HEADS + 1) * INDEX_WIDTH + INDEX_HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the distillation loss, and full attention's weight on (what was chosen, the k largest)."""
        (b, n, _), place = x.shape, torch.arange(x.shape[1], device=x.device)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).split((self.heads, 1, 1), -2)
        (q, k), v, loss = normed(q, k), v[:, :, 0], x.new_zeros((), dtype=torch.float32)
        if self.arm == "full":
            heads = q.transpose(1, 2), *(t[:, None].expand(-1, self.heads, -1, -1) for t in (k, v))
            y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
            return self.out(y.flatten(2)), loss, torch.ones_like(loss).expand(2)
        if self.arm == "window":
            indices = (place[:, None] - torch.arange(self.k, device=x.device)).clamp_min(-1).expand(b, -1, -1)
            gates = torch.ones_like(indices, dtype=q.dtype)
        else:
            scores = self.scores(x.detach())  # what trains the indexer trains nothing else
            given = scores if self.arm in ("gates", "both") else scores.detach()
            top = onepass.topk(given, self.k, lengths=place + 1, sorted=False, eps=0.3, kind="sigmoid")
            indices, gates = top.indices, top.gates
        missing, at = indices < 0, indices.clamp_min(0)
        flat = at + n * torch.arange(b, device=x.device)[:, None, None]
        q = q * self.width**-0.5
        # one gather for keys and values
        keys, values = F.embedding(flat, torch.cat((k, v), -1).flatten(0, 1)).chunk(2, -1)
        logits = torch.einsum("bqhd,bqkd->bqhk", q, keys)
        # inside the softmax: the gradient of a gate is that of taking the token out and sharing its weight
        logits = logits + gates.masked_fill(missing, 1).log()[:, :, None]
        attention = logits.masked_fill(missing[:, :, None], -math.inf).softmax(-1).to(v.dtype)
        y = self.out(torch.einsum("bqhk,bqkd->bqhd", attention, values).flatten(2))
        if self.training and self.arm not in ("distil", "both"):
            return y, loss, loss.expand(2)
        later = place > place[:, None]
        with torch.no_grad():
            full = torch.einsum("bqhd,bkd->bhqk", q, k).masked_fill(later, -math.inf)
            full = full.softmax(-1, dtype=torch.float32).mean(1)
            chosen, best = full.gather(-1, at).masked_fill(missing, 0), full.topk(min(self.k, n)).values
            # the first k queries see no more than k tokens, so their weights say nothing
            mass = torch.stack([part[:, self.k :].sum() for part in (chosen, best)]) / max(b * (n - self.k), 1)
        if self.arm in ("distil", "both"):
            guess = scores.masked_fill(later, -math.inf).log_softmax(-1, dtype=torch.float32)
            loss = F.kl_div(guess.masked_fill(later, 0), full, reduction="sum") / max(b * n, 1)
        return y, loss, mass

    def scores(self, x: Tensor) -> Tensor:
        """Return s_tj = Σ_h w_th·ReLU(q_th·k_j), the lightning indexer of DeepSeek-V3.2."""
        qk, w = self.indexer(x).split(((INDEX_HEADS + 1) * INDEX_WIDTH, INDEX_HEADS), -1)
        q, k = normed(*qk.unflatten(-1, (-1, INDEX_WIDTH)).split((INDEX_HEADS, 1), -2))
        products = torch.einsum("bqhd,bkd->bqhk", q, k).relu() / math.sqrt(INDEX_HEADS * INDEX_WIDTH)
        return torch.einsum("bqhk,bqh->bqk", products, w)


class Model(nn.Module):
    def __init__(self, arm: str, dim: int, heads: int, blocks: int, k: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(data.VOCABULARY, dim), RMSNorm(dim), nn.Linear(dim, 256)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            wide = nn.Sequential(RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            self.blocks.append(nn.ModuleList([RMSNorm(dim), SparseAttention(dim, heads, k, arm), wide]))

    def forward(self, batch: data.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of the next byte in nats, the sum of the distillation losses, and the mean of the weights."""
        device, found = self.head.weight.device, []
        tokens, answers = (torch.from_numpy(part).to(device) for part in (batch.tokens, batch.bytes))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            x = self.embedding(tokens)
            for norm, attention, wide in self.blocks:
                # a GPU keeps nothing of a layer but its input; backward chooses the same tokens again, ties included
                y, *more = checkpoint(attention, norm(x), use_reentrant=False) if x.is_cuda else attention(norm(x))
                found.append(more)
                x = x + y
                x = x + wide(x)
            logits = self.head(self.norm(x)).float()
        losses, masses = map(torch.stack, zip(*found, strict=True))
        return F.cross_entropy(logits.flatten(0, 1), answers.flatten()), losses.sum(), masses.mean(0)


def train(model: Model, text: data.Corpus, size: dict[str, int], steps: range, lr: float, seed: int) -> float:
    """Train with Lion, the rate falling to a tenth; return the median of a step's milliseconds."""
    optimizer, times = Lion(model.train().parameters(), lr=lr, weight_decay=0.1), []
    for done, step in enumerate(steps):
        started, optimizer.param_groups[0]["lr"] = time.perf_counter(), lr * (1 - 0.9 * done / len(steps))
        loss, distillation, _ = model(data.training_batch(text.training, **size, share=None, seed=seed, step=step))
        (loss + distillation).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


@torch.no_grad()
def measure(model: Model, text: data.Corpus, size: dict[str, int]) -> list[float]:
    """Return bits per byte of held-out text, and full attention's weight on what was chosen and on the k largest."""
    batches = data.validation_batches(text.validation, **size, share=None, count=64)
    found = [torch.stack((loss / math.log(2), *mass)) for loss, _, mass in map(model.eval(), batches)]
    return torch.stack(found).mean(0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="cpu", help="gpu: 16384 bytes, width 1024, 8 layers")
    parser.add_argument("--steps", type=number(1, 10**6), help="of each arm; full attention takes four times as many")
    parser.add_argument("--seeds", type=number(1, 100), default=1, help="do everything with the seeds 0, 1, …")
    parser.add_argument("--out", type=Path, help="where to write the results, as JSON")
    args = parser.parse_args()
    if (args.out and not args.out.parent.is_dir()) or (args.size == "gpu" and not torch.cuda.is_available()):
        parser.error("--out needs a folder that exists, --size gpu a CUDA device")
    size, lr, steps, shape = SIZES[args.size]
    text, steps, device, rows = data.load([]), args.steps or steps, "cuda" if args.size == "gpu" else "cpu", []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        start = Model("full", **shape).to(device)
        train(start, text, size, range(4 * steps), lr, seed)
        for arm in ARMS:
            model = Model(arm, **shape).to(device)
            model.load_state_dict(start.state_dict())
            ms = train(model, text, size, range(4 * steps, 5 * steps), lr, seed)
            bits, chosen, best = measure(model, text, size)
            rows.append({"seed": seed, "arm": arm, "bits": bits, "ms": ms, "chosen": chosen, "best": best})
            print(f"{arm:9}  {bits:.3f} bits per byte  {ms:.0f} ms a step  weight {chosen:.3f} of at most {best:.3f}")
    if args.out:
        about = {"command": sys.argv, "torch": torch.__version__, "text": text.digest, "steps": steps, **size, **shape}
        args.out.write_text(json.dumps({**about, "lr": lr, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
