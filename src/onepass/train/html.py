"""The routing picture as one self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

import codecs
from html import escape
from itertools import groupby

import numpy as np

from onepass.train.commands.errors import printable
from onepass.train.looks import Look, box, look
from onepass.train.trace import Trace

# shades differ in lightness, for eyes that see few hues; text stays readable on all of them
_STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#ffffff, #15181c); --ink: light-dark(#15181c, #e9ebee);
 --quiet: light-dark(#8a929c, #7c8590); --wrong: light-dark(#c62f00, #ff9a76); --about: light-dark(#555c66, #a3abb5);
 --line: light-dark(#cfd5dc, #3a4149); --least: light-dark(oklch(.91 .11 95), oklch(.3 .08 275));
 --most: light-dark(oklch(.68 .12 255), oklch(.5 .09 150)); }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; }
p { margin: .3rem 0; }
.about { color: var(--about); }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; margin: .7rem 0; font-size: .92rem; }
.key b, th b { display: inline-block; min-width: 1.5em; padding: 0 .3em;
 border: 1px solid var(--line); font: 14px/1.5 ui-monospace, monospace; text-align: center; }
table { border-collapse: collapse; margin: .7rem 0; font-size: .92rem; }
caption { text-align: left; color: var(--about); }
th, td { padding: .1rem 1.2rem .1rem 0; text-align: right; font-weight: 400; font-variant-numeric: tabular-nums; }
th:first-child { text-align: left; }
tr:first-child th { border-bottom: 1px solid var(--line); }
.of { display: none; }
label { cursor: pointer; margin-right: .8rem; }
pre { font: 14px/1.65 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
 overflow-wrap: anywhere; border-top: 1px solid var(--line); padding-top: 1rem;
 direction: ltr; unicode-bidi: bidi-override; tab-size: 8; }
pre i { font-style: normal; color: var(--quiet); }
pre u { display: inline-block; width: .25em; height: 1em; vertical-align: -.15em; text-decoration: none; }
.h { outline: 1.5px solid var(--ink); outline-offset: -1.5px; border-radius: 2px; }
.w { outline-color: var(--wrong); color: var(--wrong); font-weight: 700; }
"""


def page(trace: Trace, source: str) -> str:
    """Return the page with every byte of the trace; `source` describes text and model."""
    picture = look(trace)
    # the checked radio button chooses the colours and the table. The selector `~` needs the buttons as earlier siblings
    # of these, so no label wraps its button
    style, buttons, tables = [_STYLE], [], []
    for view, table in enumerate(picture.tables):
        name = f"view{view}"
        style += [
            f"#{name}:checked ~ pre .v{view}c{place} {{ background: {colour}; }}"
            for place, (colour, _) in enumerate(picture.key)
        ]
        style.append(f"#{name}:checked ~ .of.{name} {{ display: table; }}")
        checked, label = " checked" * (not view), f"block {view + 1}" if len(picture.views) > 1 else "all blocks"
        buttons.append(f'<input type="radio" name="pick" id="{name}"{checked}><label for="{name}"> {label} </label>')
        tables.append(_table(name, *table))
    key = [f"<span>{box(colour, 'a')} {words}</span>" for colour, words in picture.key]
    if trace.config.hides is not None:
        key.append('<span><b class="h">a</b> hidden from the model, guessed right</span>')
        key.append('<span><b class="h w">a</b> hidden, guessed wrong</span>')
    styles = "\n".join(style)
    # this policy blocks loading and scripts even if the escaping below has a fault
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Routing of {_safe(trace.name)}</title>
<style>{styles}</style></head><body>
<h1>{picture.title}</h1>
<p class="about">{_safe(source)}</p>
<p class="about">{_safe(numbers(trace))}</p>
<div class="key">{"".join(key)}</div>
{"".join(buttons)}
{"".join(tables)}
<pre>{_text(trace, picture)}</pre>
</body></html>
"""


def _table(name: str, caption: str, rows: list[list[str]]) -> str:
    """Return a table; the first row and the first column are heads."""
    lines = ["".join(f"<th>{cell}</th>" for cell in rows[0])]
    lines += ["".join((f"<th>{row[0]}</th>", *(f"<td>{cell}</td>" for cell in row[1:]))) for row in rows[1:]]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="of {name}"><caption>{caption}</caption>{body}</table>'


def numbers(trace: Trace) -> str:
    """Return a sentence with the shares of the trace."""
    right = int((trace.guess == np.frombuffer(trace.content, dtype=np.uint8)).sum())
    guessed = f"{int(trace.hidden.sum()):,} bytes hidden, {right:,} guessed right"
    if trace.config.hides is None:
        guessed = f"Of {len(trace.content):,} bytes {right:,} guessed right from those before"
    extent = "" if len(trace.content) == trace.total else f"; the first {len(trace.content):,} of {trace.total:,} bytes"
    return f"{look(trace).sentence}. {guessed}{extent}."


def _safe(text: str) -> str:
    """Escape a text for HTML; lone surrogates, control characters and changes of direction become Python escapes."""
    return escape(printable(text))


def _text(trace: Trace, scheme: Look) -> str:
    glyphs = _glyphs(trace.content)
    out: list[str] = []

    def shape(place: int) -> tuple[str, str]:
        """Return class names and tool tip of a byte; equal neighbours share one element."""
        names = [f"v{view}c{each[place]}" for view, each in enumerate(scheme.views) if each[place] or not scheme.plain]
        tip = ""
        if trace.hidden[place]:
            value, guess = trace.content[place], int(trace.guess[place])
            names.append("h" if guess == value else "h w")
            chance = 100 * trace.chance[place]
            tip = f"hidden {_name(value)}: guessed {_name(guess)}, gave the true byte {chance:.0f} %"
        return " ".join(names), "; ".join(filter(None, (tip, scheme.tip(place))))

    for (names, tip), places in groupby(range(len(glyphs)), key=shape):
        # a hidden byte has an element of its own, because its tool tip is about this byte alone
        for group in [[place] for place in places] if "hidden" in tip else [list(places)]:
            text = "".join(glyphs[place] for place in group)
            title = f' title="{escape(tip)}"' if tip else ""
            # keep line feeds outside: an outline around one would reach into the next line
            inside = text.rstrip("\n")
            out.append((f'<span class="{names}"{title}>{inside}</span>' if names else inside) + text[len(inside) :])
    return "".join(out)


def _glyphs(content: bytes) -> list[str]:
    """Return HTML for every byte: its character; a thin mark for all but the last byte of one of several bytes.

    Characters that are not printable, and bytes that are not UTF-8, become a middle dot.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    marks = {"\n": "<i>↵</i>\n", "\t": "<i>⇥</i>", "\ufffd": "<i>·</i>"}
    texts = (decode(content[place : place + 1], place == len(content) - 1) for place in range(len(content)))
    return ["".join(marks.get(c, escape(c) if c.isprintable() else "<i>·</i>") for c in t) or "<u></u>" for t in texts]


def _name(value: int) -> str:
    """Return a readable name of a byte: 'e' or 0x0a."""
    return f"'{chr(value)}'" if 0x20 < value < 0x7F else f"0x{value:02x}"
