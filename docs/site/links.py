"""Check a built site: every link and picture leads to a file that is there, every fragment to an element with that id.

MkDocs checks Markdown links; this also reads what themes, docstrings and raw HTML wrote. It finds examples whose
prompts (>>>) Markdown read as quotations, tables, lists, code and TeX that it read as text, and a module in the
place of the function that has its name, too.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# elements whose text is no Markdown
CODE = ("code", "pre", "script", "style")
# what stays of Markdown that was not read as such
MARKS = re.compile(r"\|---|\n[-*] |\n\d\. |``|\$\$|\$\\")


class Page(HTMLParser):
    """The links and the ids of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.quotes = self.flat = self.module = False
        self.code = 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.quotes = self.quotes or tag == "blockquote"
        self.code += tag in CODE
        for name, value in attrs:
            self.module = self.module or (name == "class" and "doc-symbol-heading doc-symbol-module" in (value or ""))
            if name in ("href", "src") and value:
                self.links.add(value)
            if name in ("id", "name") and value:
                self.ids.add(value)

    def handle_endtag(self, tag: str) -> None:
        self.code -= tag in CODE

    def handle_data(self, data: str) -> None:
        self.flat = self.flat or (not self.code and MARKS.search(data))


def dead(root: Path) -> list[str]:
    """Return a line for each link that leads nowhere and each page with a quotation; other sites are not visited."""
    pages = {path: Page(path) for path in root.rglob("*.html")}
    found = []
    for path, page in pages.items():
        if page.quotes:
            found.append(f"{path.relative_to(root)}: a quotation, most likely an example that is no code")
        if page.flat:
            found.append(f"{path.relative_to(root)}: code, TeX, list or table as text: put an empty line before it")
        if page.module:
            found.append(f"{path.relative_to(root)}: a module instead of its function: name both, module.function")
        for link in sorted(page.links):
            parts = urlsplit(link)
            # the page of missing addresses has links from the site's root
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file():
                found.append(f"{path.relative_to(root)}: {link} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].ids and anchor != "__toc":
                found.append(f"{path.relative_to(root)}: {link} names no place there")
    return found


if __name__ == "__main__":
    lines = dead(Path(sys.argv[1]).resolve())
    print("\n".join(lines) or "no dead links")
    sys.exit(bool(lines))
