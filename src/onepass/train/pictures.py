"""The pictures of a run: loss over steps, and a text with each byte shaded by its number of heavy branches."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from onepass.train.colours import INK, QUIET, WRONG, shade
from onepass.train.commands.errors import printable
from onepass.train.config import Config
from onepass.train.html import count_words, numbers
from onepass.train.metrics import Row
from onepass.train.trace import Trace, cells

COLUMNS, LINES = 100, 46
# inches of one character cell, and of the margin
WIDE, HIGH, MARGIN = 0.112, 0.215, 0.35
DPI = 144
_MONO = Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


def loss_png(metrics: Iterable[Row], config: Config, unigram: float) -> bytes:
    """Draw bits per byte over steps: training (each step and smoothed), validation, and the unigram entropy to beat."""
    train: list[tuple[int, float]] = []
    valid: list[tuple[int, float]] = []
    for row in metrics:
        for points, name in ((train, "bits_per_byte"), (valid, "validation_bits_per_byte")):
            if name in row:
                points.append((row["step"], row[name]))
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, bits = np.array(train).T
        axes.plot(steps, bits, color="#b9d4ef", linewidth=0.8, label="training, each step")
        axes.plot(steps, _smooth(bits), color="#2f78bd", linewidth=1.8, label="training, smoothed")
        lowest = min([*bits, unigram, *(value for _, value in valid)])
        # cut off the first steps, above the 8 bits of a blind guess: they would squeeze the rest
        axes.set_ylim(0.93 * lowest, max(8.5, unigram + 1) if max(bits) > 8 else None)
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color=WRONG, markersize=4.5, linewidth=1.2, label="validation")
        axes.annotate(
            f"{valid[-1][1]:.2f}",
            valid[-1],
            textcoords="offset points",
            xytext=(5, -13),
            color=WRONG,
            fontweight="bold",
        )
    axes.axhline(unigram, color=INK, linestyle="--", linewidth=1)
    axes.annotate(
        f"byte-unigram entropy of the validation text: {unigram:.2f}", (1, unigram), xycoords=("axes fraction", "data"),
        textcoords="offset points", xytext=(-4, 5), ha="right", fontsize=9,
    )  # fmt: skip
    axes.set_xlim(0, config.steps * 1.05)
    axes.set_xlabel(f"step ({config.batch} × {config.seq:,} bytes each)")
    axes.set_ylabel("bits per byte" if config.hides is None else "bits per hidden byte")
    axes.set_title(f"{config.blocks} blocks of {config.dim}, seed {config.seed}", loc="left")
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return _png(figure)


def _smooth(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the exponential average over about an eightieth of the curve, corrected for its start at zero."""
    keep = 1 - 1 / max(2.0, len(values) / 80)
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for place, value in enumerate(values):
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        out[place] = total / weight
    return out


def _grid(shown: list[str]) -> list[tuple[int, int]]:
    """Return (line, column) of each byte that fits: line feeds end lines, long lines wrap."""
    places: list[tuple[int, int]] = []
    line, column = 0, 0
    for character in shown:
        if column == COLUMNS:
            line, column = line + 1, 0
        if line == LINES:
            break
        places.append((line, column))
        column += 1
        if character == "\n":
            line, column = line + 1, 0
    return places


def routing_png(trace: Trace, source: str) -> bytes:
    """Draw the beginning of the trace on one page, a cell per byte; return the PNG."""
    shown = cells(trace.content)
    grid = _grid(shown)
    lines = max((line for line, _ in grid), default=0) + 1
    blocks = trace.config.blocks
    head = 1.55
    width, height = COLUMNS * WIDE + 2 * MARGIN, lines * HIGH + head + 2 * MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()

    small: dict[str, Any] = {"fontsize": 9.5, "color": "#555c66", "va": "center"}
    title: dict[str, Any] = {"fontsize": 15, "fontweight": "bold", "color": INK, "va": "center"}
    axes.text(MARGIN, MARGIN + 0.1, "Which bytes get the heavy branch", **title)
    axes.text(MARGIN, MARGIN + 0.38, _printable(source), **small)
    part = "" if len(grid) == len(shown) else f" Here: the first {len(grid):,} bytes; the page beside it has all."
    words = textwrap.wrap(numbers(trace) + part, 150)
    for row, line_of_words in enumerate(words[:2]):
        axes.text(MARGIN, MARGIN + 0.6 + 0.2 * row, line_of_words, **small)
    _legend(axes, MARGIN + 1.08, blocks, trace.config.hides is not None)

    top = MARGIN + head
    counts = trace.counts
    corners = [(MARGIN + column * WIDE, top + line * HIGH) for line, column in grid]
    chosen = [place for place in range(len(grid)) if counts[place]]
    _boxes(axes, [corners[p] for p in chosen], [shade(int(counts[p]), blocks) for p in chosen])
    right = [p for p in range(len(grid)) if trace.hidden[p] and trace.guess[p] == trace.content[p]]
    wrong = [p for p in range(len(grid)) if trace.hidden[p] and trace.guess[p] != trace.content[p]]
    glyphs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    is_wrong = set(wrong)
    for place, corner in enumerate(corners):
        character = "↵" if shown[place] == "\n" else shown[place]
        quiet = shown[place] in {"\n", "⇥", "·"}
        glyphs.setdefault((character, WRONG if place in is_wrong else QUIET if quiet else INK), []).append(corner)
    for (character, colour), where in glyphs.items():
        _glyph(axes, character, colour, where)
    _boxes(axes, [corners[p] for p in right], None, INK)
    _boxes(axes, [corners[p] for p in wrong], None, WRONG)
    return _png(figure)


def _boxes(axes: Any, corners: list[tuple[float, float]], fill: list[str] | None, edge: str = "none") -> None:
    # outlines lie inside their cells, so that hidden neighbours don't share a line
    inset = 0.008 if fill is None else 0.0
    boxes = [Rectangle((x + inset, y + inset), WIDE - 2 * inset, HIGH - 2 * inset) for x, y in corners]
    style: dict[str, Any] = {
        "facecolors": fill or "none",
        "edgecolors": edge,
        "linewidths": 0 if fill else 1.1,
        "antialiaseds": not fill,
    }
    axes.add_collection(PatchCollection(boxes, **style))


def _glyph(axes: Any, character: str, colour: str, corners: list[tuple[float, float]]) -> None:
    """Draw one character in many cells from a single path, so that a full page draws in a second."""
    if not character.strip():
        return
    font = font_manager.get_font(_MONO)
    if ord(character) not in font.get_charmap():
        character = "▯"
    size = WIDE / 0.602
    glyph = TextPath((0, 0), character, size=size, prop=font_manager.FontProperties(fname=_MONO))
    # the base line lies at 0.72 of the cell's height, measured down from the upper left corner
    path = glyph.transformed(Affine2D().translate(0, -0.72 * HIGH))
    stamps = PathCollection([path], offsets=corners, facecolors=colour, linewidths=0, offset_transform=axes.transData)
    stamps.set_transform(axes.figure.dpi_scale_trans)
    axes.add_collection(stamps)


def _legend(axes: Any, y: float, blocks: int, hidden: bool) -> None:
    x = MARGIN
    box: dict[str, Any] = {"ha": "left", "va": "center", "fontsize": 9.5, "color": INK}
    # with many blocks, label only the ends of the scale
    named = {0, blocks} if blocks > 4 else set(range(blocks + 1))
    for count in range(blocks + 1):
        axes.add_patch(Rectangle((x, y), 0.2, HIGH, facecolor=shade(count, blocks), edgecolor="#b9c1ca", linewidth=0.8))
        x += 0.2
        if count in named:
            axes.text(x + 0.07, y + HIGH / 2, count_words(count), **box)
            x += 1.02
    outlines = ((INK, "hidden from the model, guessed right"), (WRONG, "hidden, guessed wrong"))
    for colour, words in outlines if hidden else ():
        x += 0.15
        _glyph(axes, "a", colour, [(x, y)])
        _boxes(axes, [(x, y)], None, colour)
        axes.text(x + WIDE + 0.07, y + HIGH / 2, words, **box)
        x += WIDE + 0.2 + 0.076 * len(words)


def _printable(text: str) -> str:
    """Replace characters that the font lacks, and escape dollar signs, which would start mathematics."""
    font = font_manager.get_font(Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    return "".join(c if ord(c) in font.get_charmap() else "▯" for c in printable(text)).replace("$", r"\$")
