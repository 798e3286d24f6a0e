"""One run: the whole step in a CUDA graph, as many steps as its seconds hold, bits on text that no run trains on."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.nn import Experts, update_balance
from onepass.nn.transformer import SelfAttention
from onepass.optim import Lion
from onepass.train import data
from onepass.train.captured import EAGER, Captured
from onepass.train.commands.errors import UserError
from research.budget.model import ByteModel
from research.budget.runs import HEAD, Record, Run
from research.budget.text import Text

# torch's kernels that never hold the n × n scores
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
PACE = 20  # steps that are timed before the first weights
TRIAL = 16  # one part in so many of the run tells its pace again: an untrained router fills its experts unevenly
POINTS = 8  # measurements, the last one after the last step
CURVE, FINAL = 2**18, 2**20  # bytes of validation text at each point, and in the end
MASKED = 0.15  # part of the bytes that are hidden, where they are
OUTSIDE = 10.0  # learning rate outside the blocks, over that of the blocks


class Batches:
    """Sequences of each step, and those of the validation text."""

    def __init__(self, run: Run, text: Text) -> None:
        self.run, self.text, self.device = run, text, text.training.device
        for part, content in (("training", text.training), ("validation", text.validation)):
            if len(content) <= run.n + 1:
                raise UserError(f"n = {run.n}: the {part} text has {len(content):,} bytes; give more text")
        self.draws = torch.Generator(self.device)
        self.fresh()

    def fresh(self) -> None:
        """Begin the draws of the run's seed anew."""
        self.draws.manual_seed(self.run.seed + 1_000_003)

    def draw(self) -> tuple[Tensor, ...]:
        size = (self.run.rows,)
        last = len(self.text.training) - self.run.n
        starts = torch.randint(last, size, generator=self.draws, device=self.device)
        return self.ask(self.text.training, starts, self.draws)

    def ask(self, text: Tensor, starts: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
        """Return tokens (batch, n), the bytes to guess, and their places if not every next byte is asked for."""
        windows = text[starts[:, None] + torch.arange(self.run.n + 1, device=self.device)].long()
        tokens = windows[:, :-1]
        if self.run.task == "next":
            return tokens, windows[:, 1:]
        order = torch.rand(tokens.shape, generator=draws, device=self.device)
        places = order.topk(max(1, round(MASKED * self.run.n)), -1).indices.sort(-1).values
        return tokens.scatter(1, places, data.MASK), tokens.gather(1, places), places


class Step:
    """Forward, backward and update of a model; on CUDA a graph, which reads sequences and rates from tensors."""

    def __init__(self, run: Run, model: ByteModel, batches: Batches) -> None:
        self.run, self.model, self.batches = run, model, batches
        self.cuda = batches.device.type == "cuda"
        self.attention = ""
        if self.cuda and any(type(m) is SelfAttention and m.window is None for m in model.modules()):
            self.attention = fastest_attention(run.rows, run.width // HEAD, run.n, run.task == "next")
        tables = list(model.grams.parameters())
        inner = list(model.blocks.parameters())
        placed = {id(p) for p in (*tables, *inner)}
        groups = [
            {"params": [p for p in inner if p.dim() > 1], "scale": 1.0, "weight_decay": 0.1},
            {"params": [p for p in inner if p.dim() < 2], "scale": 1.0},
            {"params": [p for p in model.parameters() if id(p) not in placed], "scale": OUTSIDE},
        ]
        # a tensor a group on CUDA, which the graph reads
        self.optimizers: list[torch.optim.Optimizer] = [
            Lion(groups, lr=run.rate, betas=(0.9, 0.95), capturable=self.cuda)
        ]
        if tables:
            # Lion would move a row that no token reads any more as far as one that all read
            rate: Any = torch.tensor(run.rate, device=batches.device) if self.cuda else run.rate
            group = {"params": tables, "scale": OUTSIDE}
            fast = {"fused": self.cuda, "capturable": self.cuda}
            self.optimizers.append(torch.optim.Adam([group], lr=rate, betas=(0.9, 0.99), **fast))
        self.captured = Captured(self.compute, batches.device)

    def compute(self, tokens: Tensor, targets: Tensor, *places: Tensor) -> None:
        # backward then allocates gradients; those of a capture are written anew by each replay
        for parameter in self.model.parameters():
            parameter.grad = None
        with self.computing():
            loss = F.cross_entropy(self.model(tokens, *places).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self.optimizers:
            optimizer.step()
        update_balance(self.model)

    @contextlib.contextmanager
    def computing(self, compiled: bool = True) -> Iterator[None]:
        """Compute in bf16 on CUDA, with the attention that was chosen."""
        attends: Any = sdpa_kernel(BACKENDS[self.attention]) if self.attention else contextlib.nullcontext()
        # flex_attention holds all scores unless it is compiled
        eager: Any = contextlib.nullcontext()
        if not compiled and not self.run.chosen:
            eager = torch.compiler.set_stance("force_eager")
        bf16 = self.cuda or "bf16" in (self.run.stream, self.run.weights)
        # no cache of cast weights: one from before a capture would be read inside it
        with attends, eager, torch.autocast(self.batches.device.type, torch.bfloat16, bf16, cache_enabled=False):
            yield

    def __call__(self, share: float) -> None:
        """Take a step at `share` of the peak rate."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            rate = self.run.rate * group["scale"] * share
            if self.cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.captured(*self.batches.draw())

    def capture(self) -> float:
        """Take the steps that compile and capture; return milliseconds; begin with the first weights again."""
        first = [t.detach().clone() for t in self.weights()]  # else nodes of autograd stay, with this stream
        self.timed(EAGER)
        if self.cuda and self.captured.graph is None:
            raise RuntimeError(f"the step can't be captured: {self.captured.why_eager}")
        pace = self.timed(PACE)
        with torch.no_grad():
            for t, value in zip(self.weights(), first, strict=True):
                t.copy_(value)
            for t in self.states():
                t.zero_()
        self.batches.fresh()
        return pace

    def timed(self, steps: int) -> float:
        """Return the milliseconds of a step in a row of steps."""
        self(1e-3)
        synchronize(self.batches.device)
        begun = time.perf_counter()
        for _ in range(steps):
            self(1e-3)
        synchronize(self.batches.device)
        return 1e3 * (time.perf_counter() - begun) / steps

    def weights(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def states(self) -> list[Tensor]:
        """Return the optimizers' tensors, once they have taken a step."""
        kept = [state[p] for o in self.optimizers for state in (o.state,) for g in o.param_groups for p in g["params"]]
        return [value for state in kept for _, value in sorted(state.items()) if isinstance(value, Tensor)]


def train(run: Run, text: Text, cut: Path, deadline: float) -> Record | None:
    """Train to the end and return the record; at the deadline (of `time.monotonic`) leave the state in the file `cut`.

    The next call with that file goes on there. Seconds are those of training steps: neither what compiles and captures
    nor measurements count.
    """
    begun, device, before = time.perf_counter(), text.training.device, 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    torch.compiler.reset()
    torch.manual_seed(run.seed)
    model, batches = ByteModel(run).to(device), Batches(run, text)
    for layer in model.blocks:
        part: Any = getattr(layer, "feed_forward", None)
        # not experts and routed blocks: the kernels between their products are the library's own
        if run.compile == "yes" and device.type == "cuda" and run.family != "routed" and not isinstance(part, Experts):
            part.compile(fullgraph=True, dynamic=False)
    step = Step(run, model, batches)
    at, curve, seconds, pace = 0, list[dict[str, Any]](), 0.0, step.capture()
    steps = max(1, round(1e3 * run.seconds / pace))
    trial = steps // TRIAL
    if cut.exists():
        at, steps, trial, curve, seconds, pace = restore(cut, step)
    setup = time.perf_counter() - begun
    while at < steps:
        if 0 < at == trial:
            pace, trial = 1e3 * seconds / at, 0
            steps = max(at + 1, round(1e3 * run.seconds / pace))
        marks = {round(steps * point / POINTS) for point in range(1, POINTS + 1)} | {steps, trial}
        rise = max(1, min(300, steps // 20))
        synchronize(device)
        begun = time.perf_counter()
        while True:
            step(min(1.0, (at + 1) / rise) * 0.5 * (1 + math.cos(math.pi * at / steps)))
            at += 1
            late = at < steps and time.monotonic() > deadline
            if late or at in marks:
                break
        synchronize(device)
        seconds += time.perf_counter() - begun
        if late:
            keep(cut, step, (at, steps, trial, curve, seconds, pace))
            return None
        if at != trial:
            curve.append({"step": at, "seconds": round(seconds, 3), "bits": measure(step, CURVE)})
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if step.cuda else 0.0
    record = {
        "card": torch.cuda.get_device_name(device) if step.cuda else "cpu", "torch": torch.__version__,
        "text": text.digest[:16], "date": time.strftime("%Y-%m-%d"), "bits": measure(step, FINAL), "curve": curve,
        "steps": steps, "ms": round(1e3 * seconds / steps, 4), "paced_ms": round(pace, 4),
        "seconds": round(seconds, 2), "setup": round(setup, 1), "peak_mib": round(peak),
        "parameters": sum(p.numel() for p in model.parameters()), "graph": step.captured.graph is not None,
        "attention": step.attention, "load": loads(step),
    }  # fmt: skip
    cut.unlink(missing_ok=True)
    return record


@torch.no_grad()
def measure(step: Step, count: int) -> float:
    """Return bits per byte on the same `count` bytes of validation text, and hidden places, for every run; eagerly."""
    run, batches, model = step.run, step.batches, step.model
    text = batches.text.validation
    windows = max(1, min(count, len(text) - 1) // run.n)
    starts = torch.linspace(0, len(text) - run.n - 1, windows, dtype=torch.float64).long().to(batches.device)
    draws = torch.Generator(batches.device).manual_seed(7)
    nats, guessed = 0.0, 0
    model.eval()
    with step.computing(compiled=False):
        for chunk in torch.split(starts, run.rows):
            tokens, targets, *places = batches.ask(text, chunk, draws)
            logits = model(tokens, *places).flatten(0, 1)
            nats += F.cross_entropy(logits, targets.flatten(), reduction="sum").double().item()
            guessed += targets.numel()
    model.train()
    return nats / guessed / math.log(2)


@torch.no_grad()
def loads(step: Step) -> list[float]:
    """Return the tokens of each layer's fullest expert in one batch, as a multiple of the mean."""
    with step.computing(compiled=False):
        tokens, _, *places = step.batches.draw()
        step.model(tokens, *places)
    counts = [m.tokens_per_expert for m in step.model.modules() if isinstance(m, Experts)]
    return [round((count.max() / count.mean()).item(), 3) for count in counts]


def keep(cut: Path, step: Step, place: tuple[Any, ...]) -> None:
    """Write weights, momentum, the state of the draws and the place in the run, atomically."""
    partial = cut.with_suffix(f".{os.getpid()}.partial")
    tensors = [*step.weights(), *step.states()]
    torch.save({"tensors": tensors, "draws": step.batches.draws.get_state(), "place": place}, partial)
    partial.replace(cut)


@torch.no_grad()
def restore(cut: Path, step: Step) -> Any:
    """Read what `keep` wrote into the tensors that a graph reads; return the place."""
    try:
        state = torch.load(cut, map_location=step.batches.device, weights_only=True)
        for t, value in zip([*step.weights(), *step.states()], state["tensors"], strict=True):
            t.copy_(value)
        step.batches.draws.set_state(state["draws"].cpu())
        return state["place"]
    except Exception as error:
        raise UserError(f"{cut} is no state of this run ({error!s:.80}); remove it") from None


@functools.lru_cache
def fastest_attention(batch: int, heads: int, n: int, causal: bool) -> str:
    """Name the backend of torch's attention that is fastest forward and backward, in bf16; "" where there is none."""
    q, k, v = (
        torch.randn((batch, heads, n, HEAD), device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    times = {}
    for name, backend in BACKENDS.items():
        # a backend that doesn't take these shapes raises
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            for repeat in range(7):
                if repeat == 2:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                torch.autograd.grad(y, (q, k, v), y)
            torch.cuda.synchronize()
            times[name] = time.perf_counter() - start
    return min(times, key=lambda name: times[name], default="")


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
