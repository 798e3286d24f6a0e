"""Train one arm with one seed and write down what became of it; the same for every task."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from onepass.optim import Lion
from onepass.train.captured import Gradients
from onepass.train.commands import files
from onepass.train.model import parameter_groups

POINTS = 24  # measurements over a run, the first before the first step
WARMUP = 0.1  # share of the steps over which the learning rate rises


class Task(Protocol):
    """What is trained: a model, the tensors of each step, a loss of them, and figures."""

    arm: str
    device: torch.device
    model: nn.Module

    def inputs(self, step: int) -> tuple[Tensor, ...]: ...
    def loss(self, *inputs: Tensor) -> Tensor: ...
    def measure(self, last: bool) -> dict[str, Any]: ...
    def describe(self) -> dict[str, Any]: ...


class Rates(NamedTuple):
    """What Lion is given, at the peak of the schedule."""

    lr: float
    weight_decay: float = 0.0
    outside: float = 1.0  # rate of what no block holds, over that of the blocks
    beta2: float = 0.99


class Step:
    """One training step, forward to update; on CUDA forward and backward are one graph, which takes the host out."""

    def __init__(self, task: Task, rates: Rates) -> None:
        self.task, self.lr = task, rates.lr
        groups = parameter_groups(task.model, rates.weight_decay, rates.outside)
        self.optimizer = Lion(groups, lr=rates.lr, betas=(0.9, rates.beta2))
        self.gradients = Gradients(self._loss, list(task.model.parameters()), task.device)

    def __call__(self, inputs: tuple[Tensor, ...], share: float) -> Tensor:
        """Take a step at `share` of the peak learning rate; return the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group["scale"] * share
        loss: Tensor = self.gradients(*inputs)
        self.optimizer.step()
        return loss

    def _loss(self, *inputs: Tensor) -> Tensor:
        # no cache of cast weights: one from before a capture would be read inside it
        bf16 = self.task.device.type == "cuda"
        with torch.autocast(self.task.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            return self.task.loss(*inputs)


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a short rise, then half a cosine to zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Clock:
    """Seconds of steps in a row, which begin when the device has done all before them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.seconds = device, 0, 0.0
        self.begun: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Count from this step on."""
        synchronize(self.device)
        self.begun = step, time.perf_counter()

    def stop(self, step: int) -> None:
        """Count to this step, if it was started."""
        synchronize(self.device)
        if self.begun:
            self.steps += step - self.begun[0]
            self.seconds += time.perf_counter() - self.begun[1]
        self.begun = None

    @property
    def ms(self) -> float:
        """Return the milliseconds of a step."""
        return 1e3 * self.seconds / max(1, self.steps)


def train(
    task: Task,
    steps: int,
    rates: Rates,
    *,
    deadline: float = math.inf,
    say: Callable[[int, dict[str, Any]], None] = lambda step, figures: None,
) -> dict[str, Any]:
    """Train to the last step or to the deadline (of `time.monotonic`); return curve, figures and speed.

    `seconds` of a measurement are those of as many steps at the run's mean speed: measurements, and the first steps,
    which compile kernels and capture the graph, are left out of it.
    """
    one = Step(task, rates)
    marks = {round(point * steps / POINTS) for point in range(POINTS)}
    done, curve, clock = 0, list[dict[str, Any]](), Clock(task.device)
    settled = min(20, steps // 2)
    for step in range(steps):
        late = time.monotonic() > deadline
        if late or step == settled or step in marks:
            clock.stop(step)
            if late:
                break
            if step in marks:
                curve.append({"step": step, **measure(task, False)})
                say(step, curve[-1])
            if step >= settled:
                clock.start(step)
        one(task.inputs(step), rate(step, steps))
        done = step + 1
    else:
        clock.stop(steps)
    for point in curve:
        point["seconds"] = round(point["step"] * clock.ms / 1e3, 4)
    final = measure(task, True)
    say(done, final)
    return {
        "steps": steps,
        "steps_done": done,
        "ms_per_step": round(clock.ms, 3),
        "seconds": round(done * clock.ms / 1e3, 4),
        "graph": one.gradients.graph is not None,
        "why_eager": one.gradients.why_eager,
        "parameters": sum(p.numel() for p in task.model.parameters() if p.requires_grad),
        "curve": curve,
        "final": {"step": done, **final},
    }


def measure(task: Task, last: bool) -> dict[str, Any]:
    """Figures of the model as it would be used, in the precision that it trains in."""
    task.model.eval()
    with torch.autocast(task.device.type, torch.bfloat16, enabled=task.device.type == "cuda"):
        figures = task.measure(last)
    task.model.train()
    return figures


class Timed:
    """A training step with its data at hand, warm."""

    def __init__(self, task: Task) -> None:
        self.step, self.inputs, self.device = Step(task, Rates(0.0)), task.inputs(0), task.device
        for _ in range(5):
            self.step(self.inputs, 0.0)

    def ms(self) -> float:
        """Take one step; return how long it took."""
        synchronize(self.device)
        start = time.perf_counter()
        self.step(self.inputs, 0.0)
        synchronize(self.device)
        return 1e3 * (time.perf_counter() - start)


def race(runners: Sequence[Timed], rounds: int = 30) -> list[float]:
    """Median milliseconds of a step of each, taken in turn: what else the device does meets all of them alike."""
    times = [[one.ms() for one in runners] for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*times, strict=True)]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def about(device: torch.device) -> dict[str, str]:
    """Name the hardware and the software of a record."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}


def save(path: Path, record: dict[str, Any]) -> None:
    """Write one run's record in one stroke: a file that is there is whole."""
    files.write(path, json.dumps(record, indent=1) + "\n")
