"""Update parameters inside backward and free each gradient as soon as it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor, nn

from onepass.optim.lion import Lion
from onepass.optim.step import Work


class ReleasedGradients:
    """What `release_gradients` returns: a handle on its hooks."""

    def __init__(self, model: nn.Module, optimizer: Lion, bucket_bytes: int) -> None:
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._holding = False
        self._waiting: dict[int, Tensor] = {}
        self._waiting_bytes = 0
        self._works: dict[tuple[int, ...], Work] = {}
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in model.parameters() if p.requires_grad and id(p) in owned]
        if not trained:
            raise ValueError("release_gradients: the optimizer has none of the model's parameters that want gradients")
        self._handles = [p.register_post_accumulate_grad_hook(self._arrived) for p in trained]  # type: ignore[no-untyped-call]
        self._handles.append(optimizer.register_step_post_hook(self._finish))
        optimizer.releasing = True

    # a hook in a backward that torch.compile traces stays as it is
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _arrived(self, p: Tensor) -> None:
        if self._holding or p.grad is None:
            return
        if id(p) not in self._waiting:
            self._waiting[id(p)] = p
            self._waiting_bytes += p.grad.nbytes
        if self._waiting_bytes >= self._bucket_bytes:
            self.flush()

    def _finish(self, *_: object) -> None:
        """Free what the step has used: it must not stay to be added to by the next backward.

        Not all of that arrived here: not what `accumulate` held, nor gradients of parameters that weren't trained at
        first.
        """
        self._waiting.clear()
        self._waiting_bytes = 0
        for p in chain.from_iterable(group["params"] for group in self._optimizer.param_groups):
            p.grad = None

    @torch.no_grad()
    def flush(self) -> None:
        """Update and free what has arrived and waits for its bucket to be full."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        waiting = {key: p for key, p in waiting.items() if p.grad is not None}
        if not waiting:
            return
        optimizer = self._optimizer
        places = [p for group in optimizer.param_groups for p in group["params"]]
        key = tuple(i for i, p in enumerate(places) if id(p) in waiting)
        work = self._works.get(key)
        live = None if work is None else work.gradients(optimizer)
        if work is None or live is None:
            grads = [p.grad if id(p) in waiting else None for p in places]
            work = self._works[key] = Work(optimizer, grads, part=True)
            live = [g for g in grads if g is not None]
        work.run(optimizer, live)
        del live
        for p in waiting.values():
            p.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backward passes inside add up gradients; the first backward outside updates with the sum."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def remove(self) -> None:
        """Take the hooks off; gradients that still wait are left to the next `optimizer.step()`."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._optimizer.releasing = False

    def __enter__(self) -> ReleasedGradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def release_gradients(model: nn.Module, optimizer: Lion, *, bucket_bytes: int = 1 << 25) -> ReleasedGradients:
    """Let backward update the model's parameters and free their gradients as it goes.

    All gradients together are as large as the model; with this, at most `bucket_bytes` of them and the largest one
    exist at a time. Each parameter is updated when its gradient is complete, together with those that came just
    before it: the numbers are the same bits as without. Call `optimizer.step()` after backward as always: it updates
    what is left, counts for schedulers and runs step hooks; then no gradient is left. The learning rate is the one
    that the groups have during backward, which is the one that a step right after it would use. Checkpoints are
    unchanged; take them after `step()`.

    Gradient accumulation: run all backward passes but the last inside `handle.accumulate()`. Their gradients have to
    be kept for that, so the memory is saved only where the sum is complete.

    What needs all gradients at once is refused or can't be had: `clip_grad_norm`, GradScaler (use bf16), closures
    that step twice. Replicas (DistributedDataParallel) would update before they average: don't combine them.

    Args:
        model: whose parameters get the hooks; those that are not the optimizer's keep their gradients.
        optimizer: a `Lion` over them.
        bucket_bytes: gradients are collected up to this size before they are used; 0 updates one by one.

    Returns:
        A handle with `accumulate()`, `flush()` and `remove()`; as a context manager it removes the hooks at the end.

    Raises:
        TypeError: the optimizer is not a `Lion`.
        ValueError: it has none of the model's parameters; a negative bucket; or it releases already.

    Example:
        >>> import torch
        >>> from onepass.optim import Lion, release_gradients
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Lion(model.parameters())
        >>> handle = release_gradients(model, optimizer, bucket_bytes=0)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """
    if not isinstance(optimizer, Lion):
        raise TypeError(f"release_gradients: optimizer must be an onepass.optim.Lion, got {type(optimizer).__name__}")
    if bucket_bytes < 0:
        raise ValueError(f"release_gradients: bucket_bytes must be at least 0, got {bucket_bytes}")
    if optimizer.releasing:
        raise ValueError("release_gradients: this optimizer releases already; remove() its handle first")
    return ReleasedGradients(model, optimizer, bucket_bytes)
