"""A mailbox for the programs that share a row: each publishes two numbers per phase and polls those of the others.

A message is one 64-bit word, so that data and signal arrive together. Phases alternate between two slots; the sign of a
word alternates between the phases of one slot. A cooperative launch runs all programs of a team at once, so that every
message arrives.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import INTERPRET, cdiv, next_power_of_2, sm_count

# polls before a program stops waiting for its team
PATIENCE = tl.constexpr(1 << 20)


@triton.jit
def publish(ptr, first, second, phase):
    """Publish a float and a number ≥ 0, whose sign bit holds the parity of the phases of this slot."""
    low = first.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = (second.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | ((1 - (phase // 2) % 2) << 31)
    tl.atomic_xchg(ptr, (high.to(tl.int64) << 32) | low, sem="relaxed")


@triton.jit
def poll(ptr, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Return what each member published in this phase, 0 beyond the team; give up after PATIENCE polls."""
    ptrs = ptr + tl.arange(0, WIDTH)
    is_member = tl.arange(0, WIDTH) < TEAM
    negative = (phase // 2) % 2 == 0
    slots = tl.load(ptrs, mask=is_member, other=0, volatile=True)
    tries = 0
    while (tl.min((((slots < 0) == negative) | (is_member == 0)).to(tl.int32), 0) == 0) & (tries < PATIENCE):
        slots = tl.load(ptrs, mask=is_member, other=0, volatile=True)
        tries += 1
    first = slots.to(tl.int32).to(tl.float32, bitcast=True)
    second = ((slots >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def add_ready(a0, b0, ready0, a1, b1, ready1):
    return a0 + a1, b0 + b1, ready0 & ready1


@triton.jit
def poll_sums(ptr, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Return both sums of what members have published, and whether all have: one exchange between the warps."""
    is_member = tl.arange(0, WIDTH) < TEAM
    slots = tl.load(ptr + tl.arange(0, WIDTH), mask=is_member, other=0, volatile=True)
    first = slots.to(tl.int32).to(tl.float32, bitcast=True)
    second = ((slots >> 32).to(tl.int32) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    ready = (((slots < 0) == ((phase // 2) % 2 == 0)) | (is_member == 0)).to(tl.int32)
    return tl.reduce((first, second, ready), 0, add_ready)


@triton.jit
def team_sums(a, b, mailbox_ptr, member, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Return both sums over the team (TEAM = 0: a and b themselves) and the next phase; b is ≥ 0."""
    if TEAM > 0:
        slots = mailbox_ptr + (phase % 2) * TEAM
        publish(slots + member, a, b, phase)
        ready = 0
        tries = 0
        while (ready == 0) & (tries < PATIENCE):
            a, b, ready = poll_sums(slots, phase, TEAM, WIDTH)
            tries += 1
    return a, b, phase + 1


def in_registers(s: Tensor, longest: int, team: tuple[int, int, int]) -> bool:
    """Return whether a row of s (..., n) fits one program, up to `longest` columns, or a team that runs at once.

    Teams need the cooperative launches of NVIDIA. `team`: columns and warps of a program, programs per multiprocessor.
    """
    n_cols, (block_c, _, per_sm) = s.shape[-1], team
    if n_cols <= longest or INTERPRET or torch.version.hip is not None:
        return n_cols <= longest
    return cdiv(n_cols, block_c) <= sm_count(s) * per_sm


def teams(s: Tensor, block_c: int, warps: int, per_sm: int) -> tuple[int, tuple[int, ...], Tensor, dict[str, Any]]:
    """Return how teams share the long rows s (rows, n), which `in_registers` accepts.

    That is programs; constants, namely members of a team, slots that are read, rows and columns of a program; the
    mailbox; launch options.
    """
    n_rows, n_cols = s.shape
    size = cdiv(n_cols, block_c)
    count = min(n_rows, sm_count(s) * per_sm // size)
    # one slot per thread: with fewer slots, several warps would read the same ones
    width = next_power_of_2(max(size, 32 * warps))
    slots = torch.zeros(count * 4 * size, dtype=torch.int64, device=s.device)
    return count * size, (size, width, 1, block_c), slots, {"launch_cooperative_grid": True, **resident(warps, per_sm)}


def resident(warps: int, per_sm: int) -> dict[str, Any]:
    """Return launch options with which an NVIDIA multiprocessor (65536 registers) holds `per_sm` programs."""
    limit = {} if torch.version.hip is not None else {"maxnreg": min(248, 65536 // (32 * warps * per_sm) // 8 * 8)}
    return {"num_warps": warps, **limit}
