"""The training loop: steps, measurements, checkpoints, and a clean stop at any time."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.nn.experts import Experts, move_bias
from onepass.optim import Lion
from onepass.train import checkpoint as checkpoints
from onepass.train import data
from onepass.train.captured import EAGER, Captured, Gradients
from onepass.train.choices import Choices
from onepass.train.commands.errors import UserError
from onepass.train.config import Config
from onepass.train.language import ByteModel
from onepass.train.model import parameter_groups
from onepass.train.parallel import World
from onepass.train.progress import Progress, say
from onepass.train.run import Run

FLUSH = 10  # steps between two readings of the loss; each reading makes the host wait for the GPU


class InterruptedRunError(Exception):
    """A signal stopped the run in `path` after `step` of `steps` steps; its checkpoint is saved."""

    def __init__(self, signum: int, step: int, steps: int, path: Path) -> None:
        super().__init__(signum, step)
        self.signum, self.step, self.steps, self.path = signum, step, steps, path


@dataclass
class Training:
    """A model, its optimizer and the step that the run has reached."""

    config: Config
    corpus: data.Corpus
    run: Run
    checkpoint_every: int
    world: World = field(default_factory=World)
    step: int = 0
    seconds: float = 0.0  # spent in steps, over the whole run
    saved: int = -1  # step of the last checkpoint
    pending: list[tuple[int, Tensor, float]] = field(default_factory=list)
    ready: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # the batch of the next step

    def __post_init__(self) -> None:
        self.device = self.world.device(self.config.device)
        self.model: ByteModel = self.world.model(self.config, self.device)
        groups = parameter_groups(self.model, self.config.weight_decay, self.config.outside)
        betas = self.config.beta1, self.config.beta2
        # on a GPU the rate is a tensor there, which a graph of the step reads
        self.optimizer = Lion(groups, lr=self.config.lr, betas=betas, capturable=self.device.type == "cuda")
        why, parameters = self.world.why_eager, list(self.model.parameters())
        self.experts = [module for module in self.model.modules() if isinstance(module, Experts)]
        # one tensor for the counts of all layers
        self.counts = torch.zeros(len(self.experts), self.config.experts, device=self.device)
        for layer, count in zip(self.experts, self.counts, strict=True):
            layer.tokens_per_expert = count
        self.gradients = Gradients(
            lambda *batch: self._loss(*batch)[0], parameters, self.device, why, together=self.world.replicas
        )
        # captured one call later than the gradients: it reads them where their graph writes them
        self.update = Captured(self._update, self.device, why, EAGER + 1)

    def restore(self, checkpoint: checkpoints.Checkpoint | None) -> None:
        """Continue from a checkpoint, or start at step 0 without one."""
        if checkpoint:
            checkpoint = self.world.placed(checkpoint, self.model)
            checkpoints.restore_model(checkpoint, self.model)
            checkpoints.restore_optimizer(checkpoint, self.model, self.optimizer)
            self.step, self.seconds = checkpoint.step, checkpoint.seconds
        self.run.rewind(checkpoint)

    def save(self) -> None:
        """Write a checkpoint of the current step; the metrics up to this step are already on disk."""
        self.run.refuse_replaced()
        checkpoints.save(
            self.run / checkpoints.NAME, self.model, self.optimizer, self.config,
            step=self.step, metrics=self.run.mark, seconds=self.seconds, first=self.world.first,
        )  # fmt: skip
        self.saved = self.step

    def go(self, progress: Progress) -> None:
        """Train from the current step to the last; raise InterruptedRunError after a stop signal."""
        config = self.config
        with stop_signals() as received:
            stopped = self.world.stopping(received)
            if self.step == 0:
                self.save()
            self.model.train()
            eager_announced = self.device.type != "cuda"
            clock = time.perf_counter()
            while self.step < config.steps and not stopped:
                self.pending.append((self.step + 1, self._one_step(), learning_rate(config, self.step)))
                self.step += 1
                save = self.step % self.checkpoint_every == 0 or self.step == config.steps
                measure = self.step % config.eval_every == 0 and self.step < config.steps
                if not (save or measure or self.step % FLUSH == 0):
                    continue
                steps = len(self.pending)
                loss = self._flush()
                # two readings of a coarse clock may be equal: avoid a division by zero
                spent = max(time.perf_counter() - clock, 1e-9)
                speed = steps * config.batch * config.seq / spent
                self.seconds += spent
                self.world.agree(received, stopped)
                progress.update(self.step, loss, loss / math.log(2), speed)
                if self.update.why_eager and not eager_announced:
                    say(f"the step runs without a CUDA graph, which is slower: {self.update.why_eager}")
                    eager_announced = True
                if measure:
                    bits, _ = self.measure(config.eval_windows)
                    say(f"validation after {self.step:,} steps: {bits:.3f} bits per byte")
                if save:
                    self.save()
                clock = time.perf_counter()
            # a signal may have come since the last step
            self.world.agree(received, stopped)
            if stopped:
                # the signal may have arrived anywhere above: write what is still unwritten
                if self.pending:
                    self._flush()
                if self.saved != self.step:
                    self.save()
                raise InterruptedRunError(stopped[0], self.step, config.steps, self.run.path)

    def _one_step(self) -> Tensor:
        config = self.config
        for group in self.optimizer.param_groups:
            rate = group["scale"] * learning_rate(config, self.step)
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        loss: Tensor = self.gradients(*(self.ready.pop(self.step, None) or self._batch(self.step)))
        # outside the graphs: all-reduces between two of them lose little, and replays of collectives may hang
        self.world.average(self.gradients.flat, self.counts)
        # if the gradients have no graph, their addresses change: a graph of the update would read stale ones
        self.update.why_eager = self.update.why_eager or self.gradients.why_eager
        self.update()
        # draw the next batch while a GPU computes: after a reading of the loss the GPU would wait for it
        self.ready = {self.step + 1: self._batch(self.step + 1)}
        return loss

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        """Return this process's rows of a step's batch, on the device."""
        config, text = self.config, self.corpus.training
        batch = data.training_batch(text, config.batch, config.seq, config.hides, config.seed, step)
        return self._on_device(self.world.part(batch))

    @torch.no_grad()
    def _update(self) -> None:
        self.optimizer.step()
        for layer in self.experts:
            move_bias(layer, layer.tokens_per_expert)

    def _on_device(self, batch: data.Batch) -> tuple[Tensor, ...]:
        parts = [torch.from_numpy(part) for part in (batch.tokens, batch.hidden, batch.bytes)]
        if self.device.type == "cuda":
            # a copy from pinned memory does not block: the host prepares the next step while the GPU works
            parts = [part.pin_memory() for part in parts]
        return tuple(part.to(self.device, non_blocking=True) for part in parts)

    def _loss(self, tokens: Tensor, hidden: Tensor, value: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the mean cross entropy of the hidden bytes in nats, and the routings."""
        logits, routings = self.model(tokens, None if self.config.hides is None else hidden)
        return F.cross_entropy(logits.flatten(0, 1), value.flatten()), routings

    def _flush(self) -> float:
        """Log the losses since the last flush; return the last one."""
        losses = (self.world.total(torch.stack([loss for _, loss, _ in self.pending])) / self.world.size).tolist()
        rows = []
        for (step, _, lr), loss in zip(self.pending, losses, strict=True):
            self._refuse_infinite(loss, step)
            rows.append({"step": step, "loss": loss, "bits_per_byte": loss / math.log(2), "lr": lr})
        self.run.append(rows)
        self.pending.clear()
        return float(losses[-1])

    def _refuse_infinite(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {step}; try a smaller --lr (it is {self.config.lr})")

    def speed(self) -> float:
        """Return tokens per second over all steps so far, without measurements and checkpoints."""
        return self.step * self.config.batch * self.config.seq / max(self.seconds, 1e-9)

    @torch.no_grad()
    def measure(self, windows: int) -> tuple[float, dict[str, float]]:
        """Log and return bits per hidden byte of `windows` validation sequences, and by name what routers chose there.

        A finished run that is resumed measures again: its metrics were cut back to the last checkpoint.
        """
        config = self.config
        self.model.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        choices = Choices(config, self.device, self.world.total)
        for batch in data.validation_batches(self.corpus.validation, config.batch, config.seq, config.hides, windows):
            tokens, places, value = self._on_device(self.world.part(batch))
            loss, routings = self._loss(tokens, places, value)
            choices.add(routings, places, tokens.shape)
            # a process without rows runs the model only to gather weights with the others
            nats += loss.double() * places.numel() if tokens.numel() else 0.0
        self.model.train()
        hidden, numbers = choices.numbers()
        bits = self.world.total(nats).item() / hidden / math.log(2)
        # the last step may have made the weights infinite
        self._refuse_infinite(bits, self.step)
        row = {
            "step": self.step, "validation_bits_per_byte": bits, "tokens_per_s": self.speed(), "seconds": self.seconds,
            **numbers,
        }  # fmt: skip
        self.run.append([row])
        return bits, numbers


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * share))


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that the current step can end; a second signal, if SIGINT, interrupts at once."""
    received: list[int] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        if received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)

    handlers = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
