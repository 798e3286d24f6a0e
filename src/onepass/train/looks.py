"""What a routing picture shows of a trace: each byte's experts, its heavy branches, or how well it is guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onepass.train.trace import Trace, kinds

SURPRISE = (0.5, 1.0, 2.0, 4.0)  # bits from which a byte has the next shade


@dataclass
class Look:
    """A colour for each byte, in one view or several."""

    title: str
    sentence: str  # the numbers of the picture in words
    key: list[tuple[str, str]]  # (colour as CSS has it, words beside it)
    views: list[NDArray[np.int64]]  # (n,): each byte's colour, an index of `key`; where `plain`, 0 is no colour
    tables: list[tuple[str, list[list[str]]]]  # (caption, rows) of each view; the first row is the head
    tip: Callable[[int], str]  # what is said about a byte under the mouse
    plain: bool = True  # whether the first colour is the page's own


def look(trace: Trace) -> Look:
    """Return how to show a trace."""
    if trace.config.model == "routed":
        return _heavy(trace)
    return _experts(trace) if trace.config.experts else _surprise(trace)


def _experts(trace: Trace) -> Look:
    """Show bytes in the colour of the expert that takes most of them, block by block."""
    count, blocks = trace.config.experts, trace.config.blocks
    # hues around the circle, every second one lighter; text stays readable on them
    hues = [360 * expert // count + 25 for expert in range(count)]
    light, dark = (0.88, 0.76), (0.34, 0.46)
    key = [
        (f"light-dark(oklch({light[e % 2]} .1 {hue}), oklch({dark[e % 2]} .09 {hue}))", str(e + 1))
        for e, hue in enumerate(hues)
    ]
    # (blocks, experts): 1 is an equal part of the bytes
    loads = np.stack([_parts(block, count) * count for block in trace.chosen])
    byte_kinds, tables = kinds(trace), []
    for block, chosen in enumerate(trace.chosen):
        parts = [_parts(chosen[where], count) for _, where in byte_kinds]
        rows = [["expert", "load", *(name for name, _ in byte_kinds)]]
        for e, load in enumerate(loads[block]):
            rows.append([box(*key[e]), f"{'█' * round(6 * load)} {load:.2f}", *(f"{100 * p[e]:.0f} %" for p in parts)])
        caption = f"Block {block + 1}: load (1 is an equal part), and the expert's part of each kind of byte"
        tables.append((caption, rows))

    def tip(place: int) -> str:
        return "experts " + "; ".join(" and ".join(map(str, block + 1)) for block in trace.chosen[:, place])

    low, high, top_k = np.min(loads), np.max(loads), trace.config.top_k
    sentence = (
        f"{blocks} blocks of {count} experts, {top_k} a byte: they take {low:.2f} to {high:.2f} times an equal part of "
        f"the bytes"
    )
    views = list(trace.chosen[:, :, 0])
    return Look("Which expert takes each byte", sentence, key, views, tables, tip, plain=False)


def _heavy(trace: Trace) -> Look:
    """Shade bytes by the number of blocks that gave them their heavy branch."""
    routed, blocks = trace.chosen[..., 0] >= 0, trace.config.blocks
    counts = routed.sum(axis=0, dtype=np.int64)
    key = _shades(["in no block", *(f"in {n} block{'s' * (n > 1)}" for n in range(1, blocks + 1))])
    head = ["kind of byte", "share of the text", f"blocks of {blocks} that gave it their heavy branch, on average"]
    rows = [[name, f"{100 * where.mean():.1f} %", f"{counts[where].mean():.2f}"] for name, where in kinds(trace)]

    def tip(place: int) -> str:
        block_numbers = ", ".join(map(str, np.flatnonzero(routed[:, place]) + 1))
        return f"heavy branch in block {block_numbers}" if block_numbers else ""

    each, once = 100 * routed.mean(), 100 * (counts > 0).mean()
    part = f"{each:.1f} % of the bytes its heavy branch; {once:.1f} % get one at least"
    table = ("Which kinds of bytes get compute", [head, *rows])
    return Look("Which bytes get the heavy branch", f"{blocks} blocks: each gives {part}", key, [counts], [table], tip)


def _surprise(trace: Trace) -> Look:
    """Shade bytes by how little the model expected them: the picture of a model whose blocks choose nothing."""
    guessed = trace.guess >= 0
    bits = -np.log2(np.maximum(np.where(guessed, trace.chance, 1.0), 2.0**-64))
    counts = np.searchsorted(SURPRISE, bits, side="right")
    key = _shades([f"less than {SURPRISE[0]:g} bits", *(f"{step:g} bits or more" for step in SURPRISE)])
    rows = [["kind of byte", "guessed", "right", "bits of one"]]
    right = trace.guess == np.frombuffer(trace.content, dtype=np.uint8)
    for name, where in kinds(trace, hidden_apart=False):
        if (guessed_here := where & guessed).any():
            share, mean = 100 * right[guessed_here].mean(), bits[guessed_here].mean()
            rows.append([name, f"{guessed_here.sum():,}", f"{share:.0f} %", f"{mean:.2f}"])

    def tip(place: int) -> str:
        return f"{bits[place]:.1f} bits" if counts[place] and not trace.hidden[place] else ""

    sentence, table = f"{trace.config.blocks} blocks, which choose nothing", ("Which kinds of bytes are guessed", rows)
    return Look("Which bytes surprise the model", sentence, key, [counts], [table], tip)


def _parts(chosen: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return the part of the choices that each expert has."""
    return np.bincount(chosen.ravel(), minlength=count) / max(1, chosen.size)


def _shades(words: list[str]) -> list[tuple[str, str]]:
    """Return a key of shades from the page's colour, for none, and then from the least to the most."""
    steps = np.linspace(0, 100, len(words) - 1)
    mixed = [f"color-mix(in oklch, var(--most) {step:.0f}%, var(--least))" for step in steps]
    return list(zip(["var(--paper)", *mixed], words, strict=True))


def box(colour: str, inside: str) -> str:
    """Return a box of a colour, as HTML."""
    return f'<b style="background: {colour}">{inside}</b>'
