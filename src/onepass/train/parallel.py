"""The processes of a run that torchrun started: who computes what, and how they agree.

Each process has the whole model and the mean of all gradients; with `--fsdp` weights, gradients and momenta are in
shards (FSDP2). A batch and its order are those of one process: each process takes its rows. The first process alone
prints and writes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.train.checkpoint import Checkpoint
from onepass.train.commands.errors import UserError, printable
from onepass.train.config import Config, from_json
from onepass.train.data import Batch
from onepass.train.language import ByteModel
from onepass.train.model import new
from onepass.train.run import CONFIG, Run

PLAN, PRINTED = "plan", "printed"  # keys of the store that all processes read
WAIT = datetime.timedelta(days=7)  # until the first process has read its data; if it dies, torchrun ends this one
COLLECTIVE = datetime.timedelta(minutes=30)  # must be longer than the first process takes to write a checkpoint
ANSWER = 20 * 60.0  # seconds that a GPU may take for some steps; NCCL aborts the process after COLLECTIVE
GRACE = 25.0  # seconds from a stop signal to the end of this process; torchrun kills after 30


class World:
    """The processes of a run: this one, and those that torchrun started beside it. Alone, a process asks no other."""

    rank, size = 0, 1
    launcher: Sequence[str] = ()  # what follows `python` in a command that starts as many processes
    restarts = most_restarts = 0  # how often torchrun has started this process again, and will at most
    why_eager = ""  # reason not to capture the step in a CUDA graph
    fsdp = False  # whether each process holds a part of the weights
    replicas = False  # whether each of several processes holds all weights and computes its own gradients

    def __init__(self) -> None:
        self.path = Path()
        self.stopped = threading.Event()
        if not (dist.is_available() and dist.is_torchelastic_launched()):
            return
        self.restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.most_restarts = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
        if int(os.environ["WORLD_SIZE"]) > 1:
            # some builds of torch lack it
            from torch.distributed.rendezvous import rendezvous

            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank = int(os.environ["LOCAL_RANK"])
            hosts, here = os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
            where = "--standalone" if hosts == "1" else f"--nnodes={hosts}"
            self.launcher = "-m", "torch.distributed.run", where, f"--nproc-per-node={here}"
            # torchrun's store outlives the processes: a prefix separates what they wrote before and after a restart
            store, _, _ = next(rendezvous("env://", self.rank, self.size))
            self.store = dist.PrefixStore(f"onepass/{self.restarts}", store)  # type: ignore[attr-defined]

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is the only process, with or without torchrun."""
        return self.size == 1

    def restarted(self, run: Path | None) -> bool:
        """Return whether torchrun started this process again after an earlier one had begun the run."""
        if self.most_restarts and run is None:
            raise UserError("torchrun --max-restarts: a restart finds its run by --out DIR; give one")
        return self.restarts > 0 and run is not None and (run / CONFIG).is_file()

    def check(self, config: Config) -> None:
        """Raise UserError if the processes can't share the weights, or the batches of a configuration."""
        if self.alone and self.fsdp:
            raise UserError("--fsdp: one process holds all weights; start several with torchrun --nproc-per-node N")
        if config.batch % self.size:
            raise UserError(
                f"--batch {config.batch}: {self.size} processes take equal parts of a batch; "
                f"give a multiple of {self.size}"
            )

    def announce(self, run: Run, config: Config, saved: Checkpoint | None) -> None:
        """Tell the other processes what the run is; from here on all compute together."""
        if not self.alone:
            plan = {"path": str(run.path), "config": config.to_json(), "saved": saved and _outline(saved)}
            self.store.set(PLAN, json.dumps(plan))
            self._start(run.path, config)

    def follow(self) -> tuple[Run, Config, Checkpoint | None]:
        """Return what the first process announces; of a checkpoint's tensors, shapes and dtypes."""
        self.store.wait([PLAN], WAIT)
        plan = json.loads(self.store.get(PLAN))
        run, config = Run(Path(plan["path"]), writes=False), from_json(plan["config"], f"{CONFIG}: ")
        self._start(run.path, config)
        return run, config, plan["saved"] and _from_outline(run.path, config, plan["saved"])

    def _start(self, path: Path, config: Config) -> None:
        """Form the group of the processes that compute the run in `path`."""
        self.path, kind = path, config.device
        if kind == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise UserError(
                    f"torchrun --nproc-per-node: more processes than the {torch.cuda.device_count()} CUDA devices here"
                )
            torch.cuda.set_device(self.local_rank)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=COLLECTIVE)
        self.mesh = dist.device_mesh.init_device_mesh(kind, (self.size,))

    def device(self, kind: str) -> torch.device:
        """Return the device of this process."""
        return torch.device(kind, self.local_rank) if kind == "cuda" and not self.alone else torch.device(kind)

    def model(self, config: Config, device: torch.device) -> ByteModel:
        """Return the model, whole or in shards. The first process draws the weights: those of a run of one process."""
        if self.alone:
            return new(config).to(device)
        self.replicas = not self.fsdp
        self.why_eager = "" if self.replicas else "several processes gather weights between its kernels"
        drawn = new(config).state_dict() if self.first else {}
        # the other processes never hold a whole model that will be in shards
        with torch.device("meta"):
            model = new(config)
        if not self.replicas:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block, mesh=self.mesh)
            # back to shards after each forward: a checkpoint may follow a measurement, which has no backward
            fully_shard(model, mesh=self.mesh, reshard_after_forward=True)
            # the warning is harmless: the logits are a view, but nothing changes them in place
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        model.to_empty(device=device)
        with torch.no_grad():
            for buffer in model.buffers():
                # counts of tokens, which no checkpoint holds
                buffer.zero_()
            for name, value in model.state_dict().items():
                value.copy_(self._place(drawn.get(name), value, value))
        return model

    def _place(self, whole: Tensor | None, sample: Tensor, like: Any) -> Tensor:
        """Return a tensor of the first process, shaped as `sample`, placed like `like`."""
        from torch.distributed.tensor import distribute_tensor

        device = self.device(self.mesh.device_type)
        tensor = torch.empty(sample.shape, dtype=sample.dtype, device=device) if whole is None else whole.to(device)
        if not hasattr(like, "placements"):
            dist.broadcast(tensor, 0)
            return tensor
        return distribute_tensor(tensor, self.mesh, like.placements, src_data_rank=0)

    def placed(self, saved: Checkpoint, model: nn.Module) -> Checkpoint:
        """Return a checkpoint whose tensors are placed like the model's parameters."""
        if self.alone:
            return saved
        parameters = dict(model.named_buffers()) | dict(model.named_parameters())
        tensors = {}
        for name, value in sorted(saved.tensors.items()):
            kind, _, parameter = name.partition("/")
            like = parameters.get(parameter if kind == "model" else parameter.rpartition("/")[0])
            if like is None or like.shape != value.shape:
                raise UserError(f"{saved.path}: {name} {tuple(value.shape)} fits no parameter of this model")
            # neither gloo nor NCCL sends int16; Lion makes int16 of them again
            value = value.int() if value.dtype == torch.int16 else value
            tensors[name] = self._place(value if self.first else None, value, like)
        return replace(saved, tensors=tensors)

    def part(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch, perhaps none."""
        total = len(batch.tokens)
        rows = slice(*(total * rank // self.size for rank in (self.rank, self.rank + 1)))
        return Batch(batch.tokens[rows], batch.hidden[rows], batch.bytes[rows])

    def average(self, gradients: Tensor, counts: Tensor) -> None:
        """Replace counts by their sums over the processes, and gradients by their means, which FSDP2 does itself."""
        if not self.alone and counts.numel():
            dist.all_reduce(counts)
        if not self.replicas:
            return
        # gloo has no mean
        dist.all_reduce(gradients, dist.ReduceOp.AVG if gradients.is_cuda else dist.ReduceOp.SUM)
        if not gradients.is_cuda:
            gradients /= self.size

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the processes."""
        if self.alone:
            return values
        values = values.clone()
        dist.all_reduce(values)
        if values.is_cuda:
            self._settle(torch.cuda.Event())  # type: ignore[no-untyped-call]
        return values

    def _settle(self, done: Any) -> None:
        """Wait for the GPU, which waits for all others, and end this process if that takes too long."""
        done.record()
        deadline = time.monotonic() + ANSWER
        while not done.query():
            if time.monotonic() > deadline:
                self.end(1, self._gone(f"GPUs gave no answer for {ANSWER:,.0f} s"))
            time.sleep(1e-4)

    def stopping(self, received: list[int]) -> list[int]:
        """Return the list of signals that stops the loop, for the signals that this process receives."""
        if self.alone:
            return received
        # Python runs no signal handler during a collective; this byte is written at once
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._end_late, args=[reader], daemon=True).start()
        return []

    def _end_late(self, signals: socket.socket) -> None:
        """End this process GRACE seconds after a signal unless all agreed to stop: another process must be gone."""
        signum = signals.recv(1)[0]
        if not self.stopped.wait(GRACE):
            self.end(128 + signum, self._gone("it did not stop with this one"))

    def agree(self, received: Sequence[int], stop: list[int]) -> None:
        """Add to `stop` a signal that any process has received; all processes call this after the same step."""
        if self.alone:
            return
        signum = torch.tensor(max(received, default=0))
        dist.all_reduce(signum, dist.ReduceOp.MAX)
        if signum:
            stop.append(int(signum))
            self.stopped.set()

    def _gone(self, why: str) -> str:
        again = self.restarts < self.most_restarts
        on = "torchrun starts it again from there" if again else "go on with the same command and --resume"
        return f"a process of this run has ended ({why}); {self.path} has the last checkpoint: {on}"

    def leave(self, code: int) -> int:
        """Wait for all processes; return the exit code, or end with it where there are several processes."""
        if self.alone:
            return code
        # a collective on the CPU, so that no device's work is waited for
        dist.all_reduce(torch.zeros(()))
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        # the interpreter's end destroys threads of the group in any order, which aborts now and then under torch 2.11
        os._exit(code)

    def fail(self, error: BaseException) -> NoReturn:
        """End with an error. The first one of the run is printed, in one line unless this program is at fault."""
        if isinstance(error, UserError):
            self.end(2, str(error))
        if isinstance(error, KeyboardInterrupt):
            self.end(130, "interrupted")
        if isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "CUDA error")):
            # gloo begins with a place in its source, in brackets
            why = (str(error).splitlines() or [type(error).__name__])[0].rpartition("] ")[2]
            self.end(1, self._gone(f"{why:.80}"))
        self.end(1, "".join(traceback.format_exception(error)), lines=True)

    def end(self, code: int, message: str, *, lines: bool = False) -> NoReturn:
        """Print a message unless another process has printed its cause; end without waiting for others."""
        printed = 0
        with contextlib.suppress(RuntimeError):
            printed = self.store.add(PRINTED, 1) - 1
        if not printed:
            print(message if lines else f"onepass train: {printable(message)}", file=sys.stderr, flush=True)  # noqa: T201
        # a normal exit would wait for collectives that never end
        os._exit(code)


def _outline(saved: Checkpoint) -> dict[str, Any]:
    tensors = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in saved.tensors.items()}
    return {"step": saved.step, "seconds": saved.seconds, "tensors": tensors}


def _from_outline(path: Path, config: Config, outline: dict[str, Any]) -> Checkpoint:
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in outline["tensors"].items()
    }
    return Checkpoint(path, config, outline["step"], 0, "", outline["seconds"], tensors)


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Join the processes that torchrun started; without it, or with one, there is this process alone."""
    world = World()
    if world.alone:
        yield world
        return
    with open(os.devnull, "w") as devnull:
        try:
            with contextlib.nullcontext() if world.first else contextlib.redirect_stdout(devnull):
                yield world
        except BaseException as error:
            world.fail(error)
