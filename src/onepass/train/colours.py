"""The colours that both routing pictures use."""

from __future__ import annotations

# colours of "no block" and "every block"; black text stays readable on all shades between
_LIGHT, _FULL = (255, 255, 255), (90, 162, 226)
INK = "#15181c"
QUIET = "#8a929c"
WRONG = "#c62f00"


def shade(count: int, blocks: int) -> str:
    """Return the colour of a byte that `count` of `blocks` blocks gave their heavy branch."""
    # start at a fifth: the step from no block to one block must be visible
    share = 0.0 if count == 0 or blocks == 0 else 0.2 + 0.8 * (count / blocks)
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(_LIGHT, _FULL, strict=True))
