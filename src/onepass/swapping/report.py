"""What `onepass.swap` did: a table, and the way back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from .exchange import Exchange

_SHOWN = 3


class Layer(NamedTuple):
    """One norm of the model."""

    names: tuple[str, ...]  # by which the model reaches it; "" is the model itself
    kind: str  # the whole name of its class before the exchange
    becomes: str  # what it is exchanged for; "" if it is left alone
    reason: str  # why it is left alone; "" if it is exchanged


class SwapReport:
    """What `onepass.swap` exchanged and what it left alone. ``str(report)`` is a table.

    ``report.undo()`` takes the exchange back, and so does the end of ``with onepass.swap(model) as report: ...``.

    Attributes:
        layers: a `Layer` for each norm, in the order of ``model.named_modules()``: names, kind, becomes, reason.
        ours: how many norms of the model were onepass's before.
        dry_run: nothing was exchanged.
    """

    def __init__(self, layers: Iterable[Layer], exchanges: Iterable[Exchange], dry_run: bool, ours: int = 0) -> None:
        self.layers = tuple(layers)
        self.ours = ours
        self.dry_run = dry_run
        self._exchanges = tuple(exchanges)

    @property
    def exchanged(self) -> tuple[Layer, ...]:
        """The layers that are exchanged, or with dry_run would be."""
        return tuple(layer for layer in self.layers if layer.becomes)

    @property
    def left_alone(self) -> tuple[Layer, ...]:
        """The layers that are left alone."""
        return tuple(layer for layer in self.layers if not layer.becomes)

    def undo(self) -> None:
        """Give every exchanged module its class and its attributes back.

        Parameters, hooks, training flag and device are those of now: the modules were the same objects all along. A
        second call does nothing.

        Raises:
            RuntimeError: something changed the class or forward of an exchanged module since, such as a
                parametrization. Remove it first. No module is changed.
        """
        # after an undo there are no exchanges
        for layer, exchange in zip(self.exchanged, self._exchanges, strict=False):
            note = " with a forward of its own" * ("forward" in vars(exchange.module))  # accelerate's hooks leave one
            if note or type(exchange.module) is not exchange.target.cls:
                name, now = layer.names[0] or "the model", type(exchange.module).__name__ + note
                raise RuntimeError(
                    f"undo: {name} was exchanged for {layer.becomes} and is a {now} now; remove what changed it first"
                )
        for exchange in self._exchanges:
            exchange.undo()
        self._exchanges = ()

    def __enter__(self) -> SwapReport:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"SwapReport(exchanged={len(self.exchanged)}, left_alone={len(self.left_alone)}, dry_run={self.dry_run})"

    def __str__(self) -> str:
        already = f"{self.ours} already of onepass" if self.ours else ""
        if not self.layers:
            return already or "no LayerNorm or RMSNorm found"
        groups: dict[tuple[str, str, str], list[tuple[str, ...]]] = {}
        for layer in sorted(self.layers, key=lambda layer: not layer.becomes):
            groups.setdefault((layer.kind, layer.becomes, layer.reason), []).append(layer.names)
        verb = "would exchange" if self.dry_run else "exchanged"
        rows = [
            (verb if becomes else "left alone", str(len(names)),
             f"{kind} -> {becomes}" if becomes else kind, _places(sum(names, ())) + (f": {reason}" if reason else ""))
            for (kind, becomes, reason), names in groups.items()
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in rows]
        return "\n".join([*lines, already] if already else lines)


def _places(names: tuple[str, ...]) -> str:
    """Return the first few names; names that differ only in numbers between dots are one, with * for each number."""
    patterns = [re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names]
    pairs = zip(patterns, names, strict=True)
    places = dict.fromkeys(p if patterns.count(p) > 1 else name or "(the model)" for p, name in pairs)
    return ", ".join([*places][:_SHOWN]) + (", ..." if len(places) > _SHOWN else "")
