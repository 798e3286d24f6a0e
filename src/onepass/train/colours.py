"""The colours of the routing pictures: a step for each block, as even as the eye sees them, light and dark."""

from __future__ import annotations

import math

INK, PAPER = "#15181c", "#ffffff"
QUIET = "#8a929c"
WRONG = "#c62f00"
# the same on a dark page
DARK_INK, DARK_PAPER = "#e9ebee", "#15181c"
DARK_QUIET = "#7c8590"
DARK_WRONG = "#ff9a76"

# (lightness, chroma, hue in degrees) in OKLCH of the least and the most compute. Lightness alone has to tell them
# apart, for eyes that see few hues; the hue makes two steps differ twice. Text stays readable on the whole way.
_LIGHT = (0.91, 0.11, 95.0), (0.68, 0.12, 255.0)
_DARK = (0.30, 0.08, 275.0), (0.50, 0.09, 150.0)


def shade(count: int, blocks: int, *, dark: bool = False) -> str:
    """Return the colour of a byte that `count` of `blocks` blocks gave their heavy branch."""
    if count == 0 or blocks == 0:
        return DARK_PAPER if dark else PAPER
    share = 1.0 if blocks == 1 else (count - 1) / (blocks - 1)
    least, most = _DARK if dark else _LIGHT
    return _hex(*(low + (high - low) * share for low, high in zip(least, most, strict=True)))


def expert_colour(expert: int, experts: int, *, dark: bool = False) -> str:
    """Return the colour of an expert: hues around the circle, every second one lighter."""
    lightness = (0.34, 0.46) if dark else (0.88, 0.76)
    return _hex(lightness[expert % 2], 0.09 if dark else 0.1, 360 * expert / experts + 25)


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """Return an OKLCH colour as #rrggbb; the matrices are those of Björn Ottosson's Oklab."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    cones = (
        (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3,
        (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3,
        (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3,
    )
    matrix = (
        (4.0767416621, -3.3077115913, 0.2309699292),
        (-1.2684380046, 2.6097574011, -0.3413193965),
        (-0.0041960863, -0.7034186147, 1.7076147010),
    )
    linear = (sum(m * c for m, c in zip(row, cones, strict=True)) for row in matrix)
    encoded = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear)
    return "#" + "".join(f"{round(255 * min(max(v, 0.0), 1.0)):02x}" for v in encoded)
