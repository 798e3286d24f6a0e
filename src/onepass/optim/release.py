"""Update parameters inside backward and free each gradient as soon as it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.optim.lion import Lion
from onepass.optim.sharded import placed_gradients
from onepass.optim.step import Work


class ReleasedGradients:
    """The handle that `release_gradients` returns; it owns the hooks."""

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

    # keep the hook eager in a backward that torch.compile traces
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
        """Free all gradients after a step, so that the next backward does not add to used ones.

        This includes gradients that the hooks did not collect: from inside `accumulate`, and of parameters that were
        not trained at first.
        """
        self._waiting, self._waiting_bytes = {}, 0
        for p in chain.from_iterable(group["params"] for group in self._optimizer.param_groups):
            p.grad = None

    @torch.no_grad()
    def flush(self) -> None:
        """Update the parameters whose gradients wait for a full bucket, and free these gradients."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        waiting = {key: p for key, p in waiting.items() if p.grad is not None}
        if not waiting:
            return
        optimizer = self._optimizer
        places = [p for group in optimizer.param_groups for p in group["params"]]
        key = tuple(i for i, p in enumerate(places) if id(p) in waiting)
        work = self._works.get(key)
        placed = placed_gradients([{"params": list(waiting.values())}])
        live = None if work is None else work.gradients(optimizer, placed)
        if work is None or live is None:
            grads = [placed.get(id(p)) for p in places]
            work = self._works[key] = Work(optimizer, grads, part=True)
            live = [g for g in grads if g is not None]
        work.run(optimizer, live)
        del live
        for p in waiting.values():
            p.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep and add up the gradients of backward passes inside; the first backward outside updates with the sum."""
        previous, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = previous

    def remove(self) -> None:
        """Remove the hooks; the next `optimizer.step()` uses gradients that still wait."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._waiting, self._waiting_bytes = {}, 0
        self._optimizer.releasing = False

    def __enter__(self) -> ReleasedGradients:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def release_gradients(model: nn.Module, optimizer: Lion, *, bucket_bytes: int = 1 << 25) -> ReleasedGradients:
    """Update the model's parameters inside backward, and free each gradient after its use.

    All gradients together are as large as the model; with this, at most `bucket_bytes` of them and the largest one
    exist at a time. Complete gradients wait until they fill a bucket, whose parameters are then updated together: the
    results have the same bits as without. Call `optimizer.step()` after backward as always: it updates the rest, counts
    for schedulers, runs step hooks and frees all gradients. Updates use the learning rate that the groups have during
    backward. Checkpoints are unchanged; save them after `step()`.

    Gradient accumulation: run all backward passes but the last inside `handle.accumulate()`. Their gradients must be
    kept, so memory is saved in the last pass only.

    Methods that need all gradients at once do not work: `clip_grad_norm` (raises), GradScaler (use bf16) and closures
    that step twice. Do not combine this with DistributedDataParallel, whose replicas would update before they average.

    Args:
        model: its parameters get the hooks; those that the optimizer does not have keep their gradients.
        optimizer: a `Lion` over parameters of the model.
        bucket_bytes: size of a bucket, ≥ 0; 0 updates each parameter at once.

    Returns:
        A handle with `accumulate()`, `flush()` and `remove()`; a context manager that removes the hooks at its end.

    Raises:
        TypeError: the optimizer is not a `Lion`.
        ValueError: the optimizer has no trained parameter of the model, or releases already; `bucket_bytes` < 0.

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
    optimizer = getattr(optimizer, "optimizer", optimizer)  # a wrapper steps the one inside
    if not isinstance(optimizer, Lion):
        raise TypeError(f"release_gradients: optimizer must be an onepass.optim.Lion, got {type(optimizer).__name__}")
    check.not_negative("release_gradients", "bucket_bytes", bucket_bytes)
    if optimizer.releasing:
        raise ValueError("release_gradients: this optimizer releases already; remove() its handle first")
    return ReleasedGradients(model, optimizer, bucket_bytes)
