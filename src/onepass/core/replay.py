"""Run again what a call did: its branches and launch shapes depend on layouts alone, and layouts repeat.

The first call with given layouts runs as written, the second is recorded, later ones are replayed: allocate, launch.
Only allocations, views and launches can be replayed. Any other operation (a copy, a sum, a look at a value) shows in
the dispatcher while recording, and then such calls go on running as written.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import Compiled, is_recording, recording

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)
_ZEROS = (_aten.zeros.default, _aten.new_zeros.default)
# depends on its arguments alone, no tensor among them
_QUESTIONS = (_aten.promote_types.default,)
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# layouts remembered per operator; where there are more, they do not repeat
_MAX_PLANS = 4096

Plan = Callable[[tuple[Any, ...]], Any]


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """`empty_strided(shape, stride, dtype)` on the current device, which a replay has found to be this one."""
    # what Inductor's programs allocate with: no dispatcher, half the time; takes tuples alone
    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if direct is not None:
        return direct  # type: ignore[no-any-return]
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _zeros_on(device: torch.device) -> Callable[..., Tensor]:
    return lambda shape, stride, dtype: torch.zeros(shape, dtype=dtype, device=device)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What one call allocates and launches; tensors are named by their place in `pool`: arguments, then allocations."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # the pool keeps its tensors until the recording ends, so that an address belongs to one of them
        self.pool, self.n_args = list(args), len(args)
        self.allocations: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Compiled, tuple[int, int, int], list[int | None], tuple[Any, ...]]] = []
        self.replayable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            self.pool.append(out)
            self.allocations.append(
                (_zeros_on if func in _ZEROS else _empty_on, tuple(out.shape), out.stride(), out.dtype)
            )
        elif not func.is_view and func not in _QUESTIONS:
            self.replayable = False
        return out

    def launched(self, entry: Compiled, grid: Any, tensors: tuple[Tensor | None, ...], tail: Any) -> None:
        """Note a launch of a remembered kernel."""
        self.launches.append((entry, grid, [self._place(t) for t in tensors], tail))

    def refuse(self) -> None:
        """Note that the call did what can't be replayed."""
        self.replayable = False

    def _place(self, tensor: Tensor | None) -> int | None:
        """Where a replay finds the tensor, or the one that a view starts at; None for no memory."""
        if tensor is None or not tensor.data_ptr():
            return None
        for place, known in enumerate(self.pool):
            if isinstance(known, Tensor) and known.data_ptr() == tensor.data_ptr():
                return place
        self.replayable = False
        return None

    def plan(self, out: Any) -> Plan | None:
        """The recorded call as a function of its arguments; None where that would not be the same call."""
        outs: list[int | None] = []
        for t in out if isinstance(out, tuple) else (out,):
            place = self._place(t)
            new = place is not None and place >= self.n_args and _layouts((t,)) == _layouts((self.pool[place],))
            if t is not None and not new:
                return None
            outs.append(None if place is None else place - self.n_args)
        return _plan(self, outs, isinstance(out, tuple)) if self.replayable and self.launches else None


def _pick(places: list[int]) -> Callable[[list[int | None]], tuple[int | None, ...]]:
    return itemgetter(*places) if len(places) > 1 else lambda pointers: (pointers[places[0]],)


def _plan(recorder: _Recorder, outs: list[int | None], several: bool) -> Plan:
    launches, n_args, device = recorder.launches, recorder.n_args, recorder.pool[0].device
    allocations = [(make(device), *layout) for make, *layout in recorder.allocations]
    inputs = sorted({p for _, _, places, _ in launches for p in places if p is not None and p < n_args})
    # the pointers of a replay: those of the arguments that are used, of the allocations, and a null pointer
    order: dict[int | None, int] = {
        p: i for i, p in enumerate((*inputs, *range(n_args, n_args + len(allocations)), None))
    }
    steps = [
        (entry.run, grid, entry.head, _pick([order[p] for p in places]), tail) for entry, grid, places, tail in launches
    ]
    index, entry = device.index, launches[0][0]
    get_device, get_stream = entry.get_device, entry.get_stream
    enter, leave = entry.hooks.launch_enter_hook, entry.hooks.launch_exit_hook

    def replay(args: tuple[Any, ...]) -> Any:
        pointers: list[int | None] = []
        alignment = 0
        for i in inputs:
            pointer = args[i].data_ptr()
            alignment |= pointer
            pointers.append(pointer)
        if alignment & 15 or get_device() != index or enter.calls or leave.calls:
            return NotImplemented
        made = [make(shape, stride, dtype) for make, shape, stride, dtype in allocations]
        for tensor in made:
            pointers.append(tensor.data_ptr())
        pointers.append(None)
        stream = get_stream(index)
        for run, grid, head, pick, tail in steps:
            run(*grid, stream, *head, *pick(pointers), *tail)
        if several:
            return tuple([None if i is None else made[i] for i in outs])
        return None if outs[0] is None else made[outs[0]]

    return replay


def _on_gpu(x: Any) -> bool:
    return type(x) in _PLAIN_TYPES and x.is_cuda


_of_tensor = attrgetter("shape", "dtype", "device")


def _layouts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a call depends on but the values in its tensors."""
    key: list[Any] = []
    for a in args:
        kind = type(a)
        if kind in _PLAIN_TYPES:
            key.append(_of_tensor(a))
            key.append(a.stride())
        else:
            key.append(a)
    return tuple(key)


def _overlap(tensors: list[Tensor]) -> bool:
    ends = []
    for t in tensors:
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        ends.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    ends.sort()
    return any(start < end for (_, end), (start, _) in pairwise(ends))


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function` a memory of how it runs on CUDA tensors of a given layout.

    Its positional arguments are a tensor, and tensors, None and hashable values; it returns tensors that it allocated,
    or a tuple of such and None, and launches kernels by `core.launch.launch` alone, where the recorder sees them.
    """
    plans: dict[tuple[Any, ...], Plan | None] = {}
    seen: set[tuple[Any, ...]] = set()

    def record(key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if _overlap([a for a in args if isinstance(a, Tensor)]):
            # which of two tensors in one place a launch was given would not be known; others like them may be apart
            return function(*args)
        recorder = _Recorder(args)
        with recorder, recording(recorder):
            out = function(*args)
        plans[key] = recorder.plan(out)
        return out

    def run(*args: Any) -> Any:
        if not _on_gpu(args[0]) or is_recording():
            # a recorder outside must see what happens inside
            return function(*args)
        key = _layouts(args)
        plan = plans.get(key)
        if plan is not None:
            out = plan(args)
            if out is not NotImplemented:
                return out
        elif key not in plans:
            if key in seen:
                return record(key, args)
            if len(seen) >= _MAX_PLANS:
                seen.clear()
                plans.clear()
            seen.add(key)
        return function(*args)

    return run
