"""For mkdocstrings: the reStructuredText formulas and tables of the docstrings as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*|\s*(?=\n\1 {2,})))*)", re.MULTILINE)
# code, or a list or an index that Markdown would read as a link
BRACKETS = re.compile(r"(`+).*?\1|(^\[|(?<=\])\[)", re.DOTALL | re.MULTILINE)
# a line of = over each column, the head, such a line, the rows, such a line
TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n((?:.*\n)+?)\1\2\n((?:.*\n)+?)\1\2$", re.MULTILINE)
TEXT = re.compile(r"\\text\{.*?\}")
INLINE = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth):(?=`)")
# griffe would read what stands before a colon of the first line as a type: it gets the signature's
RETURNS = re.compile(r"(?<=^Returns:\n) +", re.MULTILINE)
# the section's name that griffe knows: its prompts become code, under any other name they become quotations
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Mathematics(griffe.Extension):
    """Make fenced blocks of the formulas, which `hooks.formula` draws, and MathML of those within a line."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if isinstance(obj, griffe.Function) and "gone" in obj.parameters:
            # `**gone` refuses by name what was an argument once
            del obj.parameters["gone"]
        if obj.docstring:
            text, *example = EXAMPLE.split(obj.docstring.value)
            text = ROLE.sub("", BLOCK.sub(_fenced, TABLE.sub(_table, text)))
            if isinstance(obj, griffe.Function) and obj.returns:
                text = RETURNS.sub(rf"\g<0>{obj.returns}: ", text)
            text = BRACKETS.sub(lambda found: f"\\{found[0]}" if found[2] else found[0], INLINE.sub(_inline, text))
            obj.docstring.value = "Examples:".join([text, *example])


def _table(found: re.Match[str]) -> str:
    indent, rule, head, rows = found.groups()
    starts = [match.start() for match in re.finditer("=+", rule)]
    ends = [*starts[1:], None]

    def row(line: str) -> str:
        cells = [line[len(indent) :][a:b].strip() for a, b in zip(starts, ends, strict=True)]
        return f"{indent}| {' | '.join(cells)} |"

    lines = [row(head.rstrip("\n")), f"{indent}|{'---|' * len(starts)}", *map(row, rows.splitlines())]
    return "\n".join(["", *lines, ""])


def _inline(found: re.Match[str]) -> str:
    # a span: MathML at the start of a line would be a paragraph of its own
    return f"<span>{convert(found[1])}</span>"


def _fenced(found: re.Match[str]) -> str:
    # latex2mathml shows the backslash of an escaped underscore within \text
    tex = TEXT.sub(lambda text: text[0].replace(r"\_", "_"), " ".join(line.strip() for line in found[2].splitlines()))
    indent = found[1]
    return f"{indent}```tex\n{indent}{tex.strip()}\n{indent}```\n"
