"""Train the main job's model with several optimizers on the same data: losses, optimizer memory, time of a step.

    python benchmarks/lion_training.py --out benchmarks/results/h200/raw/lion_training --steps 2000

writes lion_training.json, .png (loss curves) and .md (tables) beside each other. `--preset cpu --steps 30 --dim 16`
and so on make it small; `--together` gives each arm a process of its own, all at the same time (one GPU has room for
them, and a step is bound by its host). Each arm starts from the same weights and sees the same batches; the matrix
products are in bf16 on CUDA for all of them. The arm with bf16 weights and remainders also trains a shadow: an fp32
Lion that is given the same gradients, whose weights must be the same bits after every step. How long a step of the
optimizer takes is measured at the end, alone: fifty steps in a row, on the wall.

Both optimizers are tuned alike: `--tune 300` first tries as many rates and betas for Lion as for AdamW, over 300 steps
each, and trains with the best of each; without it they are the best that a CPU found. Everything outside the blocks
(embedding, convolution, output layer) gets ten times the rate of the blocks from both, as `onepass train` does.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.core import files
from onepass.ops.lion.reference import join
from onepass.optim import Lion
from onepass.train import config as configs
from onepass.train import data
from onepass.train.loop import learning_rate
from onepass.train.model import MEASURING_DRAWS, new, parameter_groups

# arm → (dtype of the parameters, optimizer's options; None: AdamW)
ARMS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "Lion fp32": (torch.float32, {}),
    "Lion bf16 + remainder": (torch.bfloat16, {"low_precision": "remainder"}),
    "Lion bf16 + remainder, int8 momentum": (torch.bfloat16, {"low_precision": "remainder", "state_dtype": "int8"}),
    "AdamW fused fp32": (torch.float32, None),
    "Lion bf16, stochastic": (torch.bfloat16, {"low_precision": "stochastic"}),
    "Lion bf16, nothing kept": (torch.bfloat16, {"low_precision": "none"}),
}
DEFAULT_ARMS = list(ARMS)[:4]
SHADOWED = "Lion bf16 + remainder"


class Setting(NamedTuple):
    """What is tuned."""

    lr: float  # of the blocks
    betas: tuple[float, float]


# what --tune tries, as many for each
TRIED = {
    "Lion": ((1e-3, 2e-3, 4e-3), ((0.9, 0.99), (0.9, 0.95), (0.8, 0.9))),
    "AdamW": ((5e-3, 1e-2, 2e-2), ((0.9, 0.999), (0.9, 0.99), (0.9, 0.95))),
}
SETTINGS = {"Lion": Setting(4e-3, (0.8, 0.9)), "AdamW": Setting(1e-2, (0.9, 0.999))}


def tensor_bytes(tensors: Any) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


class Shadow:
    """An fp32 Lion beside a bf16 one with remainders, given the same gradients."""

    def __init__(self, optimizer: Lion) -> None:
        self.low = [p for group in optimizer.param_groups for p in group["params"]]
        self.full = [p.detach().float().requires_grad_() for p in self.low]
        it = iter(self.full)
        groups = [
            {"params": [next(it) for _ in group["params"]], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ]
        self.optimizer = Lion(groups, state_dtype=torch.bfloat16)
        self.of = optimizer
        self.equal = True

    def step(self) -> None:
        """Follow; call before the step of the other."""
        for own, group in zip(self.optimizer.param_groups, self.of.param_groups, strict=True):
            own["lr"], own["betas"] = group["lr"], group["betas"]
        for p, q in zip(self.low, self.full, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()

    def compare(self) -> None:
        """Call after the step of the other."""
        for p, q in zip(self.low, self.full, strict=True):
            if "remainder" in self.of.state[p]:
                self.equal &= torch.equal(join(p.detach(), self.of.state[p]["remainder"]), q)


def loss_of(model: nn.Module, batch: data.Batch, config: configs.Config, draw: int) -> Tensor:
    """Mean cross entropy of the hidden bytes in nats."""
    parts = (torch.from_numpy(part).to(config.device) for part in (batch.tokens, batch.hidden, batch.bytes))
    tokens, hidden, value = parts
    with torch.autocast(config.device, torch.bfloat16, enabled=config.precision == "bf16"):
        logits, _ = model(tokens, hidden, draw=draw)
    return F.cross_entropy(logits.flatten(0, 1).float(), value.flatten())


@torch.no_grad()
def validation_bits(model: nn.Module, corpus: data.Corpus, config: configs.Config) -> float:
    """Bits per hidden byte of the validation text."""
    model.eval()
    nats, count = 0.0, 0
    batches = data.validation_batches(corpus.validation, config.batch, config.seq, config.masked, config.eval_windows)
    for batch in batches:
        nats += loss_of(model, batch, config, MEASURING_DRAWS + batch.draw).item() * batch.hidden.size
        count += batch.hidden.size
    model.train()
    return nats / count / math.log(2)


def build(arm: str, config: configs.Config, settings: dict[str, Setting]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer; a group's `peak` is the rate that the schedule starts from."""
    dtype, options = ARMS[arm]
    model: nn.Module = new(config).to(config.device, dtype)
    chosen = settings["AdamW" if options is None else "Lion"]
    groups = parameter_groups(model, config.weight_decay, config.outside)
    for group in groups:
        group["lr"] = group["peak"] = chosen.lr * group["scale"]  # type: ignore[operator]
    if options is None:
        return model, torch.optim.AdamW(groups, betas=chosen.betas, fused=True)
    return model, Lion(groups, betas=chosen.betas, **options)


def step_ms(arm: str, config: configs.Config, settings: dict[str, Setting], steps: int = 50) -> float:
    """Milliseconds of a step of the optimizer alone."""
    model, optimizer = build(arm, config, settings)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        if config.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps * 1e3)
    return min(times[1:])


def train(arm: str, corpus: data.Corpus, config: configs.Config, settings: dict[str, Setting]) -> dict[str, Any]:
    """Train one arm from the beginning."""
    model, optimizer = build(arm, config, settings)
    shadow = Shadow(optimizer) if arm == SHADOWED and isinstance(optimizer, Lion) else None
    losses: list[Tensor] = []
    begin = time.perf_counter()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate(config, step) / config.lr
        batch = data.training_batch(corpus.training, config.batch, config.seq, config.masked, config.seed, step)
        loss = loss_of(model, batch, config, batch.draw)
        optimizer.zero_grad()
        loss.backward()
        if shadow:
            shadow.step()
        optimizer.step()
        if shadow:
            shadow.compare()
        losses.append(loss.detach())
        if step % max(1, config.steps // 10) == 0:
            print(f"{arm}: step {step:,} of {config.steps:,}, loss {loss.item():.4f}", flush=True)
    if config.device == "cuda":
        torch.cuda.synchronize()
    params = list(model.parameters())
    state = tensor_bytes(v for s in optimizer.state.values() for v in s.values())
    bits = validation_bits(model, corpus, config)
    return {
        "arm": arm, "validation_bits_per_byte": bits, "parameters": sum(p.numel() for p in params),
        "parameter_bytes": tensor_bytes(params), "optimizer_bytes": state,
        "gradient_bytes": tensor_bytes(p.grad for p in params),
        "seconds": time.perf_counter() - begin, "losses": torch.stack(losses).float().tolist(),
        **({} if shadow is None else {"bit_identical_to_fp32": shadow.equal}),
    }  # fmt: skip


def tune(corpus: data.Corpus, config: configs.Config) -> tuple[dict[str, Setting], list[dict[str, Any]]]:
    """The best setting of each optimizer after `config.steps` steps in fp32, and all that were tried."""
    best, tried = {}, []
    for name, arm in (("Lion", "Lion fp32"), ("AdamW", "AdamW fused fp32")):
        for setting in itertools.starmap(Setting, itertools.product(*TRIED[name])):
            bits = train(arm, corpus, config, {name: setting})["validation_bits_per_byte"]
            tried.append({"optimizer": name, **setting._asdict(), "steps": config.steps, "validation_bits": bits})
            print(f"{name} {setting.lr:g} {setting.betas}: {bits:.4f} bits", flush=True)
        own = [t for t in tried if t["optimizer"] == name]
        chosen = min(own, key=lambda t: t["validation_bits"])
        best[name] = Setting(chosen["lr"], chosen["betas"])
    return best, tried


def train_together(arms: list[str], argv: list[str], settings: dict[str, Setting]) -> list[dict[str, Any]]:
    """Train every arm in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, str(i)) for i in range(len(arms))]
        command = [sys.executable, __file__, *(a for a in argv if a != "--together"), "--tune", "0", "--only"]
        command += ["--settings", json.dumps(settings)]
        running = [
            subprocess.Popen([*command, "--arms", arm, "--out", str(file)])
            for arm, file in zip(arms, outs, strict=True)
        ]
        failed = [arm for arm, process in zip(arms, running, strict=True) if process.wait()]
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}")
        return [json.loads(file.with_suffix(".json").read_text())["arms"][0] for file in outs]


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Loss curves of all arms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        bits = [loss / math.log(2) for loss in result["losses"]]
        width = max(1, len(bits) // 100)
        means = [statistics.fmean(bits[max(0, i + 1 - width) : i + 1]) for i in range(len(bits))]
        axes.plot(range(1, len(bits) + 1), means, linewidth=1.2, label=result["arm"])
    axes.set(
        xlabel="step", ylabel=f"bits per hidden byte (mean of {width} steps)", title="Same data, same first weights"
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    files.write(path, out.getvalue())
    plt.close(figure)


def table(results: list[dict[str, Any]]) -> str:
    """All arms in Markdown."""
    rows = [
        "| | validation bits per byte | last 5 % of losses, bits | weights + states, MB | bytes a weight | step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        tail = r["losses"][-max(1, len(r["losses"]) // 20) :]
        kept = r["parameter_bytes"] + r["optimizer_bytes"]
        same = {True: " (the bits of fp32 training)", False: " (NOT the bits of fp32 training)", None: ""}
        rows.append(
            f"| {r['arm']}{same[r.get('bit_identical_to_fp32')]} | {r['validation_bits_per_byte']:.4f} | "
            f"{statistics.fmean(tail) / math.log(2):.4f} | {kept / 1e6:.1f} | {kept / r['parameters']:.2f} | "
            f"{r['optimizer_step_ms']:.3f} |"
        )
    return "\n".join(rows) + "\n"


def tuning_table(tried: list[dict[str, Any]]) -> str:
    """All settings tried in Markdown."""
    rows = ["", "| tried | rate of the blocks | betas | steps | validation bits per byte |", "|---|---|---|---|---|"]
    for t in tried:
        betas = ", ".join(f"{beta:g}" for beta in t["betas"])
        rows.append(f"| {t['optimizer']} | {t['lr']:g} | {betas} | {t['steps']} | {t['validation_bits']:.4f} |")
    return "\n".join(rows) + "\n" if tried else ""


def main(argv: list[str] | None = None) -> int:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description="Lion's modes and AdamW on the main job's data")
    parser.add_argument("paths", nargs="*", help="text to learn from (default: the standard library's sources)")
    parser.add_argument("--out", type=Path, default=Path("lion_training"), help="where to write, without a suffix")
    parser.add_argument("--preset", choices=list(configs.PRESETS), help="default: gpu with CUDA, else cpu")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=DEFAULT_ARMS)
    parser.add_argument("--together", action="store_true", help="all arms at the same time")
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)  # train, write the JSON and stop
    parser.add_argument("--tune", type=int, default=0, metavar="STEPS", help="try rates and betas over so many steps")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help=argparse.SUPPRESS)  # of --together
    for name in ("steps", "batch", "seq", "dim", "blocks"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = data.load(args.paths)
    config = configs.build(
        args.preset or ("gpu" if device == "cuda" else "cpu"), device=device, route="learned", seed=args.seed,
        precision="bf16" if device == "cuda" else "fp32", threads=torch.get_num_threads(), data=corpus.digest, paths=(),
        **{name: getattr(args, name) for name in ("steps", "batch", "seq", "dim", "blocks")},
    )  # fmt: skip
    settings: dict[str, Setting] = {name: Setting(*given) for name, given in args.settings.items()}
    tried: list[dict[str, Any]] = []
    if args.tune:
        short = dataclasses.replace(config, steps=args.tune, warmup=min(100, args.tune // 10))
        settings, tried = tune(corpus, short)
    if args.together:
        results = train_together(args.arms, sys.argv[1:] if argv is None else argv, settings)
    else:
        results = [train(arm, corpus, config, settings) for arm in args.arms]
    for result in results if not args.only else ():
        result["optimizer_step_ms"] = step_ms(result["arm"], config, settings)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    header: dict[str, Any] = {
        "onepass": onepass.__version__, "torch": torch.__version__, "device": gpu, "config": config.as_dict(),
        "settings": settings, "tried": tried,
    }  # fmt: skip
    files.write(args.out.with_suffix(".json"), json.dumps({**header, "arms": results}) + "\n")
    if args.only:
        return 0
    files.write(args.out.with_suffix(".md"), table(results) + tuning_table(tried))
    picture(results, args.out.with_suffix(".png"))
    print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
