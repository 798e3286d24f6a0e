"""What a routing picture shows of a trace: each byte's heavy branches, its experts, or how well it is guessed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onepass.train.colours import expert_colour, shade
from onepass.train.trace import Trace, kinds


class Shades:
    """Bytes shaded by a number of each, whose values `words` name; of 0 they have no shade."""

    title: str
    view: str  # what the page's only button says
    words: list[str]

    def __init__(self, trace: Trace, counts: NDArray[np.int64]) -> None:
        self.trace, self.counts = trace, counts

    def palette(self, dark: bool) -> dict[str, str]:
        """Return colours of the page by name."""
        return {f"s{count}": shade(count, len(self.words) - 1, dark=dark) for count in range(len(self.words))}

    def buttons(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return (id, label, colours by class) of the page's views."""
        return [("all", self.view, {f"c{count}": f"s{count}" for count in range(1, len(self.words))})]

    def names(self, place: int) -> list[str]:
        """Return the classes of a byte."""
        return [f"c{self.counts[place]}"] if self.counts[place] else []

    def key(self) -> list[tuple[str, str, str]]:
        """Return (colour's name, text inside, words beside) of the legend."""
        return [(f"s{count}", "a", each) for count, each in enumerate(self.words)]


class Heavy(Shades):
    """Bytes shaded by the number of blocks that gave them their heavy branch."""

    title, view = "Which bytes get the heavy branch", "all blocks"

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, trace.counts)
        self.blocks = trace.config.blocks
        self.words = ["in no block", *(f"in {n} block{'s' * (n > 1)}" for n in range(1, self.blocks + 1))]

    def tip(self, place: int) -> str:
        """Return what is said about a byte under the mouse."""
        blocks = ", ".join(str(block + 1) for block in np.flatnonzero(self.trace.routed[:, place]))
        return f"heavy branch in block {blocks}" if blocks else ""

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        """Return (class, caption, rows) of tables; the first row is the head."""
        average = f"blocks of {self.blocks} that gave it their heavy branch, on average"
        rows = [
            [name, f"{100 * there.mean():.1f} %", f"{self.counts[there].mean():.2f}"]
            for name, there in kinds(self.trace)
        ]
        return [("", "Which kinds of bytes get compute", [["kind of byte", "share of the text", average], *rows])]

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


class Guesses(Shades):
    """Bytes shaded by how little the model expected them: of a model whose blocks choose nothing."""

    title, view = "Which bytes surprise the model", "the model"
    steps = (0.5, 1.0, 2.0, 4.0)  # bits

    def __init__(self, trace: Trace) -> None:
        self.asked = trace.guess >= 0
        self.bits = -np.log2(np.maximum(np.where(self.asked, trace.chance, 1.0), 2.0**-64))
        super().__init__(trace, np.searchsorted(self.steps, self.bits, side="right"))
        self.words = [f"less than {self.steps[0]:g} bits", *(f"{step:g} bits or more" for step in self.steps)]

    def tip(self, place: int) -> str:
        return f"{self.bits[place]:.1f} bits" if self.counts[place] and not self.trace.hidden[place] else ""

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        rows = [["kind of byte", "guessed", "right", "bits of one"]]
        right = self.trace.guess == np.frombuffer(self.trace.content, dtype=np.uint8)
        for name, there in kinds(self.trace, seen=False):
            if (asked := there & self.asked).any():
                share, bits = 100 * right[asked].mean(), self.bits[asked].mean()
                rows.append([name, f"{asked.sum():,}", f"{share:.0f} %", f"{bits:.2f}"])
        return [("", "Which kinds of bytes are guessed", rows)]

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
