"""A mailbox for the programs that share a row: each publishes two numbers per phase and polls those of the others.

A message is one 64-bit word, so that data and signal arrive together. Its sign tells apart the two phases that use the
same slot. All programs of a team run at once (a cooperative launch), so that each message arrives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import INTERPRET, cdiv, next_power_of_2, sm_count

# polls before a program stops waiting for its team
PATIENCE = tl.constexpr(1 << 20)


@triton.jit
def publish(ptr, first, second, phase):
    """Send a float and a number ≥ 0 to the team; the second's sign bit tells apart the two phases that share a slot."""
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = (second.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | ((1 - (phase // 2) % 2) << 31)
    tl.atomic_xchg(ptr, (high.to(tl.int64) << 32) | low, sem="relaxed")


@triton.jit
def poll(ptr, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Read what every member published in this phase, 0 beyond the team. Waits for PATIENCE polls at most."""
    ptrs = ptr + tl.arange(0, WIDTH)
    here = tl.arange(0, WIDTH) < TEAM
    negative = (phase // 2) % 2 == 0
    slots = tl.load(ptrs, mask=here, other=0, volatile=True)
    tries = 0
    while (tl.min((((slots < 0) == negative) | (here == 0)).to(tl.int32), 0) == 0) & (tries < PATIENCE):
        slots = tl.load(ptrs, mask=here, other=0, volatile=True)
        tries += 1
    first = slots.to(tl.int32).to(tl.float32, bitcast=True)
    second = ((slots >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def add_ready(a0, b0, ready0, a1, b1, ready1):
    return a0 + a1, b0 + b1, ready0 & ready1


@triton.jit
def poll_sums(ptr, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Both sums of what members have published, and whether all have: one exchange between the warps."""
    here = tl.arange(0, WIDTH) < TEAM
    slots = tl.load(ptr + tl.arange(0, WIDTH), mask=here, other=0, volatile=True)
    first = slots.to(tl.int32).to(tl.float32, bitcast=True)
    second = ((slots >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    ready = (((slots < 0) == ((phase // 2) % 2 == 0)) | (here == 0)).to(tl.int32)
    return tl.reduce((first, second, ready), 0, add_ready)


@triton.jit
def team_sums(a, b, mailbox_ptr, member, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Sum both numbers over the team, if there is one; the second is ≥ 0."""
    if TEAM > 0:
        slots = mailbox_ptr + (phase % 2) * TEAM
        publish(slots + member, a, b, phase)
        ready = 0
        tries = 0
        while (ready == 0) & (tries < PATIENCE):
            a, b, ready = poll_sums(slots, phase, TEAM, WIDTH)
            tries += 1
    return a, b, phase + 1


class Team(NamedTuple):
    """Programs per row, rows at a time, columns of a program, slots that are looked at, and the launch options."""

    size: int
    teams: int
    block_c: int
    width: int
    options: dict[str, Any]


def team_of(s: Tensor, block_c: int, warps: int, per_sm: int) -> Team | None:
    """The launch of a team per long row, whose programs all fit on the GPU at once; None where they do not."""
    if INTERPRET or torch.version.hip is not None:
        return None
    n_rows, n_cols = s.shape
    size = cdiv(n_cols, block_c)
    teams = min(n_rows, sm_count(s) * per_sm // size)
    if not teams:
        return None
    # a slot per thread: with fewer, all warps would read the same ones
    width = next_power_of_2(max(size, 32 * warps))
    return Team(size, teams, block_c, width, {"launch_cooperative_grid": True, **resident(warps, per_sm)})


def resident(warps: int, per_sm: int) -> dict[str, Any]:
    """Launch options under which a multiprocessor of an NVIDIA GPU (65536 registers) holds several programs."""
    limit = {} if torch.version.hip is not None else {"maxnreg": min(248, 65536 // (32 * warps * per_sm) // 8 * 8)}
    return {"num_warps": warps, **limit}
