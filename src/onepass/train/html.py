"""The routing picture as one self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

from html import escape
from itertools import groupby

import numpy as np

from onepass.train.colours import (
    DARK_INK,
    DARK_PAPER,
    DARK_QUIET,
    DARK_WRONG,
    INK,
    PAPER,
    QUIET,
    WRONG,
    shade,
)
from onepass.train.commands.errors import printable
from onepass.train.trace import Trace, cells, kinds, name_of

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; }
p { margin: .3rem 0; }
.about { color: var(--about); }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; margin: .7rem 0; font-size: .92rem; }
.key b { display: inline-block; min-width: 1.5em; padding: 0 .3em;
 border: 1px solid var(--line); font: 14px/1.5 ui-monospace, monospace; text-align: center; }
table { border-collapse: collapse; margin: .7rem 0; font-size: .92rem; }
caption { text-align: left; color: var(--about); }
th, td { padding: .1rem 1.2rem .1rem 0; text-align: right; font-weight: 400; font-variant-numeric: tabular-nums; }
th:first-child { text-align: left; }
tr:first-child th { border-bottom: 1px solid var(--line); }
label { cursor: pointer; margin-right: .8rem; }
pre { font: 14px/1.65 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
 overflow-wrap: anywhere; border-top: 1px solid var(--line); padding-top: 1rem;
 direction: ltr; unicode-bidi: bidi-override; tab-size: 8; }
pre i { font-style: normal; color: var(--quiet); }
pre u { display: inline-block; width: .25em; height: 1em; vertical-align: -.15em; text-decoration: none; }
.h { outline: 1.5px solid var(--ink); outline-offset: -1.5px; border-radius: 2px; }
.w { outline-color: var(--wrong); color: var(--wrong); font-weight: 700; }
"""


def _palette(blocks: int, *, dark: bool) -> str:
    """Return the page's colours as CSS variables; `--sN` is the shade of N blocks, `--one` that of a single block."""
    ink, paper, quiet, wrong = (DARK_INK, DARK_PAPER, DARK_QUIET, DARK_WRONG) if dark else (INK, PAPER, QUIET, WRONG)
    about, line = ("#a3abb5", "#3a4149") if dark else ("#555c66", "#cfd5dc")
    colours = {"ink": ink, "paper": paper, "quiet": quiet, "wrong": wrong, "about": about, "line": line}
    colours |= {f"s{count}": shade(count, blocks, dark=dark) for count in range(blocks + 1)}
    colours["one"] = shade(1, 1, dark=dark)
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in colours.items()) + " }"


def page(trace: Trace, source: str) -> str:
    """Return the page with every byte of the trace; `source` describes text and model."""
    blocks = trace.config.blocks
    style = [_palette(blocks, dark=False)]
    style += ["@media (prefers-color-scheme: dark) {", _palette(blocks, dark=True), "}", _STYLE]
    # the checked radio button decides which classes are coloured: cN for bytes in N blocks, rN for bytes in block N
    for block in range(1, blocks + 1):
        style.append(f"#all:checked ~ pre .c{block} {{ background: var(--s{block}); }}")
        style.append(f"#b{block}:checked ~ pre .r{block} {{ background: var(--one); }}")
    # the selector `~` needs the buttons as earlier siblings of the text, so no label wraps its button
    buttons = ['<input type="radio" name="pick" id="all" checked><label for="all"> all blocks </label>']
    buttons += [
        f'<input type="radio" name="pick" id="b{block}"><label for="b{block}"> block {block} </label>'
        for block in range(1, blocks + 1)
    ]
    key = [
        f'<span><b style="background: var(--s{count})">a</b> {count_words(count)}</span>' for count in range(blocks + 1)
    ]
    if trace.config.hides is not None:
        key.append('<span><b class="h">a</b> hidden from the model, guessed right</span>')
        key.append('<span><b class="h w">a</b> hidden, guessed wrong</span>')
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # this policy blocks loading and scripts even if the escaping below has a fault
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>Routing of {_safe(trace.name)}</title>",
            f"<style>{chr(10).join(style)}</style></head><body>",
            "<h1>Which bytes get the heavy branch</h1>",
            f'<p class="about">{_safe(source)}</p>',
            f'<p class="about">{_safe(numbers(trace))}</p>',
            _summary(trace),
            f'<div class="key">{"".join(key)}</div>',
            "<p>Show the choices of</p>",
            "".join(buttons),
            f"<pre>{_text(trace)}</pre>",
            "</body></html>",
            "",
        ]
    )


def _summary(trace: Trace) -> str:
    """Return a table of the kinds of bytes and the compute that they get."""
    rows = [
        f"<tr><th>{name}</th><td>{100 * share:.1f} %</td><td>{mean:.2f}</td></tr>" for name, share, mean in kinds(trace)
    ]
    blocks_head = f"blocks of {trace.config.blocks} that gave it their heavy branch, on average"
    head = f"<tr><th>kind of byte</th><th>share of the text</th><th>{blocks_head}</th></tr>"
    return f"<table><caption>Which kinds of bytes get compute</caption>{head}{''.join(rows)}</table>"


def numbers(trace: Trace) -> str:
    """Return a sentence with the shares of the trace."""
    config = trace.config
    n = max(len(trace.content), 1)
    right = int((trace.guess == np.frombuffer(trace.content, dtype=np.uint8)).sum())
    hidden = int(trace.hidden.sum())
    chosen = (
        f"{config.blocks} blocks: each gives {100 * trace.routed.mean():.1f} % of the bytes its heavy branch; "
        f"{100 * (trace.counts > 0).sum() / n:.1f} % get one at least"
    )
    guessed = f"{hidden:,} bytes hidden, {right:,} guessed right"
    if config.hides is None:
        guessed = f"Of {len(trace.content):,} bytes {right:,} guessed right from those before"
    whole = "" if len(trace.content) == trace.total else f"; the first {len(trace.content):,} of {trace.total:,} bytes"
    return f"{chosen}. {guessed}{whole}."


def count_words(count: int) -> str:
    """Return the legend text of a shade."""
    return "in no block" if count == 0 else f"in {count} block" + "s" * (count > 1)


def _safe(text: str) -> str:
    """Escape a text for HTML; lone surrogates, control characters and changes of direction become Python escapes."""
    return escape(printable(text))


def _text(trace: Trace) -> str:
    counts, shown = trace.counts, cells(trace.content)
    out: list[str] = []

    def look(place: int) -> tuple[str, str]:
        """Return class names and tool tip of a byte; equal neighbours share one element."""
        blocks = [block + 1 for block in range(trace.config.blocks) if trace.routed[block, place]]
        names = [f"c{counts[place]}", *(f"r{block}" for block in blocks)] if blocks else []
        tip = ""
        if trace.hidden[place]:
            value, guess = trace.content[place], int(trace.guess[place])
            names.append("h" if guess == value else "h w")
            chance = 100 * trace.chance[place]
            tip = f"hidden {name_of(value)}: guessed {name_of(guess)}, gave the true byte {chance:.0f} %"
        if blocks:
            tip += ("; " if tip else "") + "heavy branch in block " + ", ".join(map(str, blocks))
        return " ".join(names), tip

    for (names, tip), places in groupby(range(len(shown)), key=look):
        # a hidden byte has an element of its own, as its tool tip is about it alone
        for group in [[place] for place in places] if "hidden" in tip else [list(places)]:
            text = "".join(_glyph(shown[place]) for place in group)
            title = f' title="{escape(tip)}"' if tip else ""
            # keep line feeds outside: an outline around one would reach into the next line
            inside = text.rstrip("\n")
            out.append((f'<span class="{names}"{title}>{inside}</span>' if names else inside) + text[len(inside) :])
    return "".join(out)


def _glyph(character: str) -> str:
    if character == "\n":
        return "<i>↵</i>\n"
    if character in {"·", "⇥"}:
        return f"<i>{character}</i>"
    return _safe(character) if character else "<u></u>"
