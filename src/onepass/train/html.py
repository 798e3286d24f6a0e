"""The routing picture as one self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

from html import escape
from itertools import groupby

import numpy as np

from onepass.train.colours import DARK_INK, DARK_PAPER, DARK_QUIET, DARK_WRONG, INK, PAPER, QUIET, WRONG
from onepass.train.commands.errors import printable
from onepass.train.looks import Look, box, look
from onepass.train.trace import Trace, cells, name_of

_STYLE = """
:root { color-scheme: light dark; }
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


def _palette(look: Look, *, dark: bool) -> str:
    """Return the page's colours as CSS variables."""
    ink, paper, quiet, wrong = (DARK_INK, DARK_PAPER, DARK_QUIET, DARK_WRONG) if dark else (INK, PAPER, QUIET, WRONG)
    about, line = ("#a3abb5", "#3a4149") if dark else ("#555c66", "#cfd5dc")
    colours = {"ink": ink, "paper": paper, "quiet": quiet, "wrong": wrong, "about": about, "line": line}
    return ":root { " + " ".join(f"--{n}: {c};" for n, c in (colours | look.palette(dark)).items()) + " }"


def page(trace: Trace, source: str) -> str:
    """Return the page with every byte of the trace; `source` describes text and model."""
    shown = look(trace)
    style = [_palette(shown, dark=False)]
    style += ["@media (prefers-color-scheme: dark) {", _palette(shown, dark=True), "}", _STYLE]
    # the checked radio button decides which classes are coloured and which table is shown. The selector `~` needs the
    # buttons as earlier siblings of these, so no label wraps its button
    buttons = []
    for place, (name, label, colours) in enumerate(shown.buttons()):
        style += [f"#{name}:checked ~ pre .{each} {{ background: var(--{c}); }}" for each, c in colours.items()]
        style.append(f"#{name}:checked ~ .of.{name} {{ display: table; }}")
        checked = " checked" * (not place)
        buttons.append(f'<input type="radio" name="pick" id="{name}"{checked}><label for="{name}"> {label} </label>')
    key = [f"<span>{box(name, inside)} {words}</span>" for name, inside, words in shown.key()]
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
            f"<h1>{shown.title}</h1>",
            f'<p class="about">{_safe(source)}</p>',
            f'<p class="about">{_safe(numbers(trace))}</p>',
            f'<div class="key">{"".join(key)}</div>',
            "<p>Show the choices of</p>",
            "".join(buttons),
            *(_table(*each) for each in shown.tables()),
            f"<pre>{_text(trace, shown)}</pre>",
            "</body></html>",
            "",
        ]
    )


def _table(name: str, caption: str, rows: list[list[str]]) -> str:
    """Return a table; the first row and the first column are heads."""
    lines = ["".join(f"<th>{cell}</th>" for cell in rows[0])]
    lines += ["".join((f"<th>{row[0]}</th>", *(f"<td>{cell}</td>" for cell in row[1:]))) for row in rows[1:]]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="{name}"><caption>{caption}</caption>{body}</table>'


def numbers(trace: Trace) -> str:
    """Return a sentence with the shares of the trace."""
    right = int((trace.guess == np.frombuffer(trace.content, dtype=np.uint8)).sum())
    guessed = f"{int(trace.hidden.sum()):,} bytes hidden, {right:,} guessed right"
    if trace.config.hides is None:
        guessed = f"Of {len(trace.content):,} bytes {right:,} guessed right from those before"
    whole = "" if len(trace.content) == trace.total else f"; the first {len(trace.content):,} of {trace.total:,} bytes"
    return f"{look(trace).sentence()}. {guessed}{whole}."


def _safe(text: str) -> str:
    """Escape a text for HTML; lone surrogates, control characters and changes of direction become Python escapes."""
    return escape(printable(text))


def _text(trace: Trace, how: Look) -> str:
    shown = cells(trace.content)
    out: list[str] = []

    def shape(place: int) -> tuple[str, str]:
        """Return class names and tool tip of a byte; equal neighbours share one element."""
        names, tip = how.names(place), ""
        if trace.hidden[place]:
            value, guess = trace.content[place], int(trace.guess[place])
            names.append("h" if guess == value else "h w")
            chance = 100 * trace.chance[place]
            tip = f"hidden {name_of(value)}: guessed {name_of(guess)}, gave the true byte {chance:.0f} %"
        return " ".join(names), "; ".join(filter(None, (tip, how.tip(place))))

    for (names, tip), places in groupby(range(len(shown)), key=shape):
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
