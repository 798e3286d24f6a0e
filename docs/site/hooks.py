"""What MkDocs calls: pages made of READMEs and docstrings, and links out of `docs/` that lead somewhere on the site.

The READMEs stay beside the code that they describe, with links that work in a checkout. Here each becomes a page. A
link to another such file becomes a link to its page; any other file that is linked is copied to the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# folder of the package with a README → what its page shows of the package after the README's start
FOLDERS = {
    "ops/norm": ("layer_norm", "rms_norm", "Quantized", "nn.LayerNorm", "nn.RMSNorm"),
    "ops/qk_norm_rope": ("qk_norm_rope",),
    "ops/weighted_sum": ("weighted_sum", "nn.WeightedSum"),
    "ops/soft_topk": ("soft_topk",),
    "ops/coor_descent": ("coor_descent",),
    "ops/topk": ("topk", "TopK", "kth_value"),
    "ops/routing": ("nn.Router",),
    "ops/span_attention": ("nn.LocalAttention",),
    "ops/causal_choice": ("nn.CausalRouter",),
    "ops/experts": (
        "nn.Experts", "nn.update_balance", "nn.load_balancing_loss", "nn.router_z_loss", "experts", "expert_order",
    ),
    "ops/lion": ("optim.Lion", "optim.clip_grad_norm", "optim.release_gradients"),
    "fused": (
        "nn.TransformerBlock", "nn.RoutedBlock", "nn.RoutedFeedForward", "nn.RoutedAttention",
        "nn.RoutedCrossAttention", "nn.Routed", "nn.Decoder", "nn.routing_stats", "nn.graphed.graphed",
    ),
}  # fmt: skip
# its module has the same name
OPTIONS = {"nn.graphed.graphed": "    options:\n      heading: onepass.nn.graphed\n      toc_label: graphed\n"}
# file of the repository → page of the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "measuring.md",
    "research/budget/README.md": "budget.md",
    **{f"src/onepass/{name}/README.md": f"operators/{posixpath.basename(name)}.md" for name in FOLDERS},
}
# pages whose tables and pictures take the room of the list of headings
WIDE = ("examples.md", "topk.md", "performance.md", "evidence.md", "reliability.md", "files/benchmarks/results/bars.md")
# lab notes and raw records are read by who follows a link
UNSEARCHED = ("lab/", "files/", "budget.md", "measuring.md", "changelog.md")
# not the index and the call of kernel[grid](x)
LINK = re.compile(r"(?<!\w)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
# the ends of a name's parts, where a phone may break it, and code in the cells of tables
JOINT = re.compile(r"(?<=[A-Za-z][._/=(])(?=[A-Za-z0-9\"&])(?!py\b)|(?<=[a-z])(?=[A-Z])")
CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
TEX = re.compile(r"\$\$(.+?)\$\$|\$(\\.+?)\$")
INNER = re.compile(r"^ {3}```.*?^ {3}```\n", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)


class Site:
    """The pages and copied files, found by following the links from the pages above."""

    def __init__(self, config: MkDocsConfig) -> None:
        self.config = config
        self.files: dict[str, File] = {}

    def page_of(self, path: str) -> str | None:
        """Return the place on the site of a file of the repository, which is added if it is not there yet."""
        if path in PAGES:
            return PAGES[path]
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if not (ROOT / path).is_file():
            return None
        place = f"files/{path}"
        if place not in self.files:
            if path.endswith(".md"):
                self.add(path, place, "")
            else:
                self.files[place] = File.generated(self.config, place, abs_src_path=str(ROOT / path))
        return place

    def add(self, path: str, place: str, before: str) -> None:
        """Add a page from a Markdown file of the repository."""
        # written first: two files may link to each other
        self.files[place] = File.generated(self.config, place, content="")
        text = before + self.rewritten((ROOT / path).read_text(encoding="utf-8"), path, place)
        self.files[place] = File.generated(self.config, place, content=text)

    def rewritten(self, text: str, path: str, place: str) -> str:
        """Point the links of a file at `path` to where the site has their targets, as seen from `place`."""

        def one(found: re.Match[str]) -> str:
            label, target = found.groups()
            if re.match(r"[a-z]+:|#|/", target):
                return found[0]
            name, mark, anchor = target.partition("#")
            there = self.page_of(posixpath.normpath(str(PurePosixPath(path).parent / name)))
            if there is None:
                # a directory: there is nothing to show
                return label[1:-1]
            return f"{label}({posixpath.relpath(there, posixpath.dirname(place) or '.')}{mark}{anchor})"

        parts = FENCE.split(text)
        return "".join(p if p.startswith("```") else TEX.sub(math, LINK.sub(one, lists(p))) for p in parts)


def math(found: re.Match[str]) -> str:
    """Draw TeX that stands as GitHub reads it: between $$, or within a line between $."""
    return f"<span>{convert(found[2])}</span>" if found[2] else formula(found[1], "", "", {}, None)


def lists(text: str) -> str:
    """Write lists as MkDocs reads them: an empty line before the first item, four spaces before what is inside one."""
    text = INNER.sub(lambda block: indent(block[0], " ") + "\n", text)
    text = re.sub(r"^ {2,3}(?=[-*] )", "    ", text, flags=re.MULTILINE)
    # a list right after a block of code, which `rewritten` has split off
    text = re.sub(r"\A\n(?=(?:[-*]|1\.) )", "\n\n", text)
    return re.sub(r"^(?![-*|#>]|\d+\.|\s)(.+\n)(?=(?:[-*]|1\.) )", r"\1\n", text, flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made of READMEs and docstrings."""
    site = Site(config)
    for path, place in PAGES.items():
        site.add(path, place, "")
    for name, members in FOLDERS.items():
        # the README's example first, then the package's own words, then the rest of the README
        place = f"operators/{posixpath.basename(name)}.md"
        start, _, rest = site.files[place].content_string.partition("\n## ")
        api = "\n".join(f"::: onepass.{member}\n{OPTIONS.get(member, '')}" for member in members)
        inside = f"\n## Inside\n{deeper(f'## {rest}')}" if rest else ""
        site.files[place] = File.generated(config, place, content=f"{start}\n\n{api}{inside}")
    for file in list(files):
        if file.is_documentation_page():
            # finds what the written pages link to; their text is rewritten in `on_page_markdown`
            site.rewritten(file.content_string, f"docs/{file.src_uri}", file.src_uri)
    config.extra["site"] = site
    for file in site.files.values():
        files.append(file)
    return files


def deeper(text: str) -> str:
    """Move the headings one level down, outside code."""
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else re.sub("^#", "##", part, flags=re.MULTILINE) for part in parts)


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of the pages in `docs/`; those of other pages are rewritten already."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    if page.file.generated_by:
        return markdown
    text: str = config.extra["site"].rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    return text


def on_page_content(html: str, **kwargs: Any) -> str:
    """Say where code in a table may break: a browser breaks it anywhere, or not at all."""

    def cell(found: re.Match[str]) -> str:
        return CODE.sub(lambda code: JOINT.sub("<wbr>", code[0]), found[0])

    return CELL.sub(cell, html)


def formula(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """Turn a fenced block of TeX into MathML, which browsers draw without a script."""
    return f'<div class="formula">{convert(source.strip(), display="block")}</div>'
