"""Replay calls: an operator's branches and launch shapes depend on layouts alone, and layouts repeat.

The first call with given layouts runs as written, the second is recorded, later ones are replayed: allocate, launch.
A replay repeats allocations, views and launches. The recorder is a dispatch mode and sees any other operation (a copy,
a sum, a read of a value); such calls keep running as written. `ONEPASS_REPLAY=0` turns replay off.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.core import check
from onepass.core.eager import PLAIN_TYPES

from .compiled import Compiled, Grid, is_recording, launch_arguments, recording

# read at import, as operators wrap their functions then
REPLAY = check.setting("ONEPASS_REPLAY", "1", "0") == "1"

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default)
_ZEROS = (_aten.zeros.default, _aten.new_zeros.default)
# these only compute dtypes and read no tensor: a replay may skip them
_QUESTIONS = (_aten.promote_types.default,)
# layouts remembered per operator; a program with more of them rarely repeats one
_MAX_PLANS = 4096

Plan = Callable[[tuple[Any, ...]], Any]


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """Return `empty_strided(shape, stride, dtype)` on the current device; a replay checks that it is `device`."""
    # Inductor's allocation function skips the dispatcher and takes half the time; shapes must be tuples
    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if direct is not None:
        return direct  # type: ignore[no-any-return]
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)


# an address: index of a tensor in the recorder's pool, offset in bytes
Place = tuple[int, int]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what one call allocates and launches; `pool` numbers its tensors: arguments, then allocations."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # the pool keeps its tensors alive while recording, so that an address belongs to one tensor only
        self.pool, self.n_args = list(args), len(args)
        tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor) and a.data_ptr()}
        self.starts = {a.data_ptr(): i for i, a in tensors.items()}
        self.extents = sorted(map(_extent, tensors.values()))
        # arguments that overlap, as parts of a packed projection do, are told apart by their first bytes only
        self.overlapping = any(start < end for (_, end), (start, _) in pairwise(self.extents))
        self.device: torch.device = next(a.device for a in args if isinstance(a, Tensor))
        self.allocations: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[tuple[Compiled, Grid, list[Place | None], tuple[Any, ...]]] = []
        self.replayable = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True wraps `__torch_dispatch__` in a function that imports torch._dynamo: 2 to 4 s in a program's second step
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (func in _EMPTY or func in _ZEROS) and out.device == self.device:
            self.pool.append(out)
            make = "zeros" if func in _ZEROS else "empty"
            self.allocations.append((make, (tuple(out.shape), out.stride(), out.dtype)))
        elif func.is_view:
            if self.overlapping and self._begins_elsewhere(args[0], out):
                # the view may begin where another argument does
                self.replayable = False
        elif func not in _QUESTIONS:
            self.replayable = False
        return out

    def launched(
        self, entry: Compiled, grid: Grid, tensors: tuple[Tensor | None, ...], scalars: tuple[Any, ...]
    ) -> None:
        """Record a launch of a compiled kernel."""
        self.launches.append((entry, grid, [self._place(t) for t in tensors], scalars))

    def refuse(self) -> None:
        """Record that the call did something that a replay can't repeat."""
        self.replayable = False

    def _begins_elsewhere(self, base: Tensor, views: Any) -> bool:
        """Return whether a view of an argument begins at another byte."""
        at = base.data_ptr()
        views = views if isinstance(views, list | tuple) else (views,)
        return any(start <= at < end for start, end in self.extents) and any(v.data_ptr() != at for v in views)

    def _place(self, tensor: Tensor | None) -> Place | None:
        """Return the tensor's address in the pool; None without memory, or outside the pool (then: no replay)."""
        if tensor is None or not tensor.data_ptr():
            return None
        if self.overlapping and tensor.data_ptr() in self.starts:
            return self.starts[tensor.data_ptr()], 0
        for index, owner in enumerate(self.pool):
            if isinstance(owner, Tensor) and owner.data_ptr():
                start, end = _extent(owner)
                if start <= tensor.data_ptr() < end:
                    return index, tensor.data_ptr() - start
        self.replayable = False
        return None

    def plan(self, out: Any) -> Plan | None:
        """Return the recorded call as a function of its arguments; None where a replay would differ from the call."""
        outs: list[int | None] = []
        for t in out if isinstance(out, tuple) else (out,):
            index = None if t is None else self._allocated_as(t, outs)
            if t is not None and index is None:
                return None
            outs.append(index)
        return _plan(self, outs, isinstance(out, tuple)) if self.replayable and self.launches else None

    def _allocated_as(self, t: Tensor, taken: list[int | None]) -> int | None:
        """Return the index of the allocation that t is, or that t views as a whole; None if there is none.

        A replay allocates in the shape that the call returns: this costs nothing, a view costs the host 5 µs.
        """
        index, offset = self._place(t) or (-1, 0)
        if index < self.n_args or offset:
            return None
        owner = self.pool[index]
        if _layouts((t,)) == _layouts((owner,)):
            return index
        whole = t.numel() == owner.numel() and t.dtype == owner.dtype and t.is_contiguous() and owner.is_contiguous()
        if not whole or index in taken:
            return None
        make, _ = self.allocations[index - self.n_args]
        self.allocations[index - self.n_args] = make, (tuple(t.shape), t.stride(), t.dtype)
        self.pool[index] = t
        return index


@functools.cache
def _code(program: str) -> CodeType:
    # the program holds names instead of values, so calls that differ only in sizes share it
    return compile(program, "<replay>", "exec")


def _plan(recorder: _Recorder, outs: list[int | None], several: bool) -> Plan:
    """Generate a program from the record; it takes less host time than a loop over the record."""
    device, n_args, launches = recorder.device, recorder.n_args, recorder.launches
    places = {place[0] for _, _, tensors, _ in launches for place in tensors if place is not None}
    inputs = sorted(place for place in places if place < n_args)
    first = launches[0][0]
    names: dict[str, Any] = {
        "index": device.index, "get_device": first.get_device, "get_stream": first.get_stream,
        "enter": first.hooks.launch_enter_hook, "leave": first.hooks.launch_exit_hook,
        "empty": _empty_on(device),
        "zeros": lambda shape, stride, dtype: torch.zeros(shape, dtype=dtype, device=device),
    }  # fmt: skip

    def named(*values: Any) -> list[str]:
        """Return new names for these values in the program."""
        by_name = {f"c{len(names) + i}": value for i, value in enumerate(values)}
        names.update(by_name)
        return list(by_name)

    def address(place: Place | None) -> str:
        if place is None:
            return "None"
        index, offset = place
        return f"p{index} + {named(offset)[0]}" if offset else f"p{index}"

    lines = ["def replay(args):"]
    lines += [f"p{i} = args[{i}].data_ptr()" for i in inputs]
    misaligned = f"({' | '.join(f'p{i}' for i in inputs) or 0}) & 15"
    lines.append(f"if {misaligned} or get_device() != index or enter.calls or leave.calls: return NotImplemented")
    for i, (make, layout) in enumerate(recorder.allocations, n_args):
        lines.append(f"t{i} = {make}({', '.join(named(*layout))})")
        if i in places:
            lines.append(f"p{i} = t{i}.data_ptr()")
    lines.append("stream = get_stream(index)")
    for entry, grid, tensors, scalars in launches:
        run, *head = named(entry.run, *entry.head)
        pointers = list(map(address, tensors))
        arguments = launch_arguments(named(*grid), "stream", head, pointers, named(*scalars), entry.packed)
        texts = [a if isinstance(a, str) else f"({', '.join(a)},)" for a in arguments]
        lines.append(f"{run}({', '.join(texts)})")
    outputs = ["None" if place is None else f"t{place}" for place in outs]
    lines.append("return " + "".join(f"{t}, " if several else t for t in outputs))
    exec(_code("\n    ".join(lines)), names)
    return names["replay"]  # type: ignore[no-any-return]


def _on_gpu(x: Any) -> bool:
    return type(x) in PLAIN_TYPES and x.is_cuda


def _layouts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a call: all that its launches depend on, which the values in its tensors are not."""
    return tuple(
        [
            # a contiguous tensor's shape gives its strides; `is_contiguous` is faster than `stride`
            (a.shape, a.is_contiguous() or a.stride(), a.dtype, a.get_device()) if type(a) in PLAIN_TYPES else a
            for a in args
        ]
    )


def _extent(t: Tensor) -> tuple[int, int]:
    """Return the address of the tensor's first byte, and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def replayed(function: Callable[..., Any], state: Callable[[], Any] | None = None) -> Callable[..., Any]:
    """Return `function` with replay: it repeats calls on CUDA tensors of known layouts without running `function`.

    The positional arguments are tensors, None and hashable values; the first that is not None is a tensor. `function`
    returns tensors that it allocated, or a tuple of such tensors and None, and launches kernels by
    `core.launch.launch` alone, where the recorder sees them. `state()` is what else the launches depend on.
    """
    if not REPLAY:
        return function
    plans: dict[tuple[Any, ...], Plan] = {}
    n_calls: dict[tuple[Any, ...], int] = {}

    def record(key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        recorder = _Recorder(args)
        with recorder, recording(recorder):
            out = function(*args)
        if (plan := recorder.plan(out)) is not None:
            plans[key] = plan
        return out

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        first = args[0] if args[0] is not None else next((a for a in args if a is not None), None)
        if not _on_gpu(first) or is_recording():
            # an outer recorder must see this call's launches
            return function(*args)
        key = _layouts(args) if state is None else (*_layouts(args), state())
        if (plan := plans.get(key)) is not None:
            out = plan(args)
            return function(*args) if out is NotImplemented else out
        if len(n_calls) >= _MAX_PLANS and key not in n_calls:
            n_calls.clear()
            plans.clear()
        # record the second call; if that gave no plan, also the third, the fifth, the ninth, …: the cause
        # (a profiler, a misaligned tensor, a first compilation) may be gone by then
        times = n_calls.get(key, 0)
        due = times > 0 and not times & (times - 1)
        starts = [a.data_ptr() for a in args if due and isinstance(a, Tensor) and a.data_ptr()]
        if len(set(starts)) < len(starts):
            # two arguments share an address: don't record this call; others of this layout may have theirs apart
            return function(*args)
        n_calls[key] = times + 1
        if not due:
            return function(*args)
        # a program that compiles must not trace the recorder
        dynamo = sys.modules.get("torch._dynamo")
        return record(key, args) if dynamo is None else dynamo.disable(record)(key, args)

    return run
