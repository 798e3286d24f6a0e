"""The picture of a run: its loss over the steps."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from onepass.train.config import Config
from onepass.train.metrics import Row


@style.context("default")  # a user's may need LaTeX
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
        axes.plot(*zip(*valid, strict=True), "o-", color="#c62f00", label=f"validation: {valid[-1][1]:.2f}")
    axes.axhline(unigram, color="#15181c", linestyle="--", label=f"byte-unigram entropy of its text: {unigram:.2f}")
    axes.set_xlabel(f"step ({config.batch} × {config.seq:,} bytes each)")
    axes.set_ylabel("bits per byte" if config.hides is None else "bits per hidden byte")
    axes.set_title(f"{config.blocks} blocks of {config.dim}, seed {config.seed}", loc="left")
    axes.legend(frameon=False, loc="upper right")
    axes.grid(alpha=0.25)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144)
    return out.getvalue()


def _smooth(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the average over an eightieth of the curve around each step."""
    near = np.ones(max(1, len(values) // 80))
    return np.asarray(np.convolve(values, near, "same") / np.convolve(np.ones(len(values)), near, "same"))
