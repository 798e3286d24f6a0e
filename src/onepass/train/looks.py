"""What a routing picture shows of a trace: each byte's heavy branches, its experts, or how well it is guessed."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepass.train.colours import expert_colour, shade
from onepass.train.trace import Trace, kinds


class Heavy:
    """Bytes shaded by the number of blocks that gave them their heavy branch."""

    title = "Which bytes get the heavy branch"

    def __init__(self, trace: Trace) -> None:
        self.trace, self.blocks, self.counts = trace, trace.config.blocks, trace.counts

    def palette(self, dark: bool) -> dict[str, str]:
        """Return colours of the page by name: `sN` is the shade of N blocks, `one` that of a single block."""
        shades = {f"s{count}": shade(count, self.blocks, dark=dark) for count in range(self.blocks + 1)}
        return shades | {"one": shade(1, 1, dark=dark)}

    def buttons(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return (id, label, colours by class) of the page's views: cN for N blocks, rN for block N."""
        every = range(1, self.blocks + 1)
        whole = {f"c{block}": f"s{block}" for block in every}
        return [
            ("all", "all blocks", whole),
            *((f"b{block}", f"block {block}", {f"r{block}": "one"}) for block in every),
        ]

    def names(self, place: int) -> list[str]:
        """Return the classes of a byte."""
        chosen = [f"r{block + 1}" for block in np.flatnonzero(self.trace.routed[:, place])]
        return [f"c{self.counts[place]}", *chosen] if chosen else []

    def tip(self, place: int) -> str:
        """Return what is said about a byte under the mouse."""
        blocks = ", ".join(str(block + 1) for block in np.flatnonzero(self.trace.routed[:, place]))
        return f"heavy branch in block {blocks}" if blocks else ""

    def key(self) -> list[tuple[str, str, str]]:
        """Return (colour's name, text inside, words beside) of the legend."""
        return [(f"s{count}", "a", count_words(count)) for count in range(self.blocks + 1)]

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        """Return (class, caption, rows) of tables; the first row is the head."""
        head = [
            "kind of byte",
            "share of the text",
            f"blocks of {self.blocks} that gave it their heavy branch, on average",
        ]
        rows = [
            [name, f"{100 * there.mean():.1f} %", f"{self.counts[there].mean():.2f}"]
            for name, there in kinds(self.trace)
        ]
        return [("", "Which kinds of bytes get compute", [head, *rows])]

    def sentence(self) -> str:
        """Return the numbers of the picture in words."""
        each, once = 100 * self.trace.routed.mean(), 100 * (self.counts > 0).mean()
        part = f"{each:.1f} % of the bytes its heavy branch; {once:.1f} % get one at least"
        return f"{self.blocks} blocks: each gives {part}"


class Colours:
    """Bytes in the colour of the expert that takes most of them, block by block."""

    title = "Which expert takes each byte"

    def __init__(self, trace: Trace) -> None:
        self.trace, self.blocks, self.experts = trace, trace.config.blocks, trace.config.experts
        # (blocks, experts): 1 is an equal part of the bytes
        counts = np.stack([np.bincount(block.ravel(), minlength=self.experts) for block in trace.chosen])
        self.loads = counts * (self.experts / max(1, trace.chosen[0].size))

    def palette(self, dark: bool) -> dict[str, str]:
        return {f"x{expert + 1}": expert_colour(expert, self.experts, dark=dark) for expert in range(self.experts)}

    def buttons(self) -> list[tuple[str, str, dict[str, str]]]:
        names = range(1, self.experts + 1)
        return [
            (f"b{block}", f"block {block}", {f"b{block}x{name}": f"x{name}" for name in names})
            for block in range(1, self.blocks + 1)
        ]

    def names(self, place: int) -> list[str]:
        return [f"b{block + 1}x{best + 1}" for block, best in enumerate(self.trace.chosen[:, place, 0])]

    def tip(self, place: int) -> str:
        taken = (" and ".join(str(expert + 1) for expert in block) for block in self.trace.chosen[:, place])
        return "experts " + "; ".join(taken)

    def key(self) -> list[tuple[str, str, str]]:
        return [(f"x{expert + 1}", str(expert + 1), "") for expert in range(self.experts)]

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        found = kinds(self.trace)
        head = ["expert", "load", *(name for name, _ in found)]
        tables = []
        for block, chosen in enumerate(self.trace.chosen):
            rows = [
                [box(*each[:2]), f"{'█' * round(6 * load)} {load:.2f}"]
                for each, load in zip(self.key(), self.loads[block], strict=True)
            ]
            for _, there in found:
                parts = np.bincount(chosen[there].ravel(), minlength=self.experts) / chosen[there].size
                rows = [[*row, f"{100 * part:.0f} %"] for row, part in zip(rows, parts, strict=True)]
            caption = f"Block {block + 1}: load (1 is an equal part), and the expert's part of each kind of byte"
            tables.append((f"of b{block + 1}", caption, [head, *rows]))
        return tables

    def sentence(self) -> str:
        low, high = self.loads.min(), self.loads.max()
        return (
            f"{self.blocks} blocks of {self.experts} experts, {self.trace.config.top_k} a byte: they take {low:.2f} to "
            f"{high:.2f} times an equal part of the bytes"
        )


class Guesses:
    """Bytes shaded by how little the model expected them: of a model whose blocks choose nothing."""

    title = "Which bytes surprise the model"
    steps = (0.5, 1.0, 2.0, 4.0)  # bits

    def __init__(self, trace: Trace) -> None:
        self.trace, self.asked = trace, trace.guess >= 0
        self.bits = -np.log2(np.maximum(np.where(self.asked, trace.chance, 1.0), 2.0**-64))
        self.counts = np.searchsorted(self.steps, self.bits, side="right")

    def palette(self, dark: bool) -> dict[str, str]:
        return {f"s{count}": shade(count, len(self.steps), dark=dark) for count in range(len(self.steps) + 1)}

    def buttons(self) -> list[tuple[str, str, dict[str, str]]]:
        return [("all", "the model", {f"c{count}": f"s{count}" for count in range(1, len(self.steps) + 1)})]

    def names(self, place: int) -> list[str]:
        return [f"c{self.counts[place]}"] if self.counts[place] else []

    def tip(self, place: int) -> str:
        return f"{self.bits[place]:.1f} bits" if self.counts[place] and not self.trace.hidden[place] else ""

    def key(self) -> list[tuple[str, str, str]]:
        words = [f"less than {self.steps[0]:g} bits", *(f"{step:g} bits or more" for step in self.steps)]
        return [(f"s{count}", "a", each) for count, each in enumerate(words)]

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        rows, right = [["kind of byte", "guessed", "right", "bits of one"]], self.trace.guess == self._values()
        for name, there in kinds(self.trace, seen=False):
            if (asked := there & self.asked).any():
                share, bits = 100 * right[asked].mean(), self.bits[asked].mean()
                rows.append([name, f"{asked.sum():,}", f"{share:.0f} %", f"{bits:.2f}"])
        return [("", "Which kinds of bytes are guessed", rows)]

    def _values(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.trace.content, dtype=np.uint8)

    def sentence(self) -> str:
        return f"{self.trace.config.blocks} blocks, which choose nothing"


Look = Heavy | Colours | Guesses


def look(trace: Trace) -> Look:
    """Return how to show a trace."""
    if trace.config.model == "routed":
        return Heavy(trace)
    return Colours(trace) if trace.config.experts else Guesses(trace)


def box(colour: str, inside: str) -> str:
    """Return a box of a colour of the page, as HTML."""
    return f'<b style="background: var(--{colour})">{inside}</b>'


def count_words(count: int) -> str:
    """Return the legend text of a shade."""
    return "in no block" if count == 0 else f"in {count} block" + "s" * (count > 1)
