"""Fill in what a release knows: its version, its date and where the repository is.

    make release VERSION=0.2.0 URL=https://host/owner/onepass

Writes pyproject.toml, CITATION.cff, mkdocs.yml, CHANGELOG.md and `__version__`, then prints what is left to do. A
second run with other values replaces the first one's.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

LEFT = """Left to do, in this order:
 1. make newest; make gpu ARGS='--record FILE' on one GPU and on two: every test marked gpu.
 2. README's install line says pip install onepass; its links are absolute, as an index shows it without the repository.
 3. python tests/test_stability.py > tests/stability.json, if it differs: from this release on its names stay.
 4. make test-all on a fresh clone; dist/ has the wheel and the sdist, checked by twine and used with torch alone.
 5. The package index trusts the repository, the workflow release.yml and its environment pypi, once.
 6. Commit, tag v{version}, push the tag: the workflow builds, tests and publishes. It has never run.
 7. pip install onepass=={version} in a new environment; onepass doctor."""
VERSION = re.compile(r"\d+\.\d+\.\d+")


def put(path: Path, pattern: str, line: str, after: str = "") -> None:
    """Replace what the pattern finds in a file by `line`; where it finds nothing, put the line after `after`."""
    text = path.read_text(encoding="utf-8")
    if re.search(pattern, text, re.MULTILINE):
        text = re.sub(pattern, lambda _: line, text, count=1, flags=re.MULTILINE)
    elif after and after in text:
        text = text.replace(after, f"{after}\n{line}", 1)
    else:
        raise SystemExit(f"{path}: neither {pattern!r} nor {after!r} is in it")
    path.write_text(text, encoding="utf-8")


def fill(root: Path, version: str, url: str, date: str) -> None:
    """Write version, address and date into the files of a checkout."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"VERSION must be as 0.2.0, got {version!r}")
    if not re.fullmatch(r"https://[^\s/]+/[^\s/]+/[^\s/]+", url):
        raise SystemExit(f"URL must be as https://host/owner/name, without a slash at its end, got {url!r}")
    urls = {
        "Source": url, "Documentation": f"{url}/blob/v{version}/docs/start.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md", "Issues": f"{url}/issues",
    }  # fmt: skip
    lines = "\n".join(["[project.urls]", *(f'{name} = "{address}"' for name, address in urls.items())])
    pyproject = root / "pyproject.toml"
    put(pyproject, r"^\[project\.urls\](?:\n\w+ = .*)*$", lines, "# where the project is: `make release` writes it")
    put(root / "CITATION.cff", r"^repository-code: .*$", f"repository-code: {url}", "license: MIT")
    put(root / "CITATION.cff", r"^version: .*$", f"version: {version}")
    put(root / "CITATION.cff", r"^date-released: .*$", f"date-released: {date}")
    put(root / "mkdocs.yml", r"^repo_url: .*$", f"repo_url: {url}", "site_name: onepass")
    put(root / "src/onepass/__init__.py", r'^__version__ = ".*"$', f'__version__ = "{version}"')
    heading = f"## [{version}] - {date}"
    put(root / "CHANGELOG.md", rf"^## \[{re.escape(version)}\] - .*$", heading, "## [Unreleased]\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("url")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    given = parser.parse_args()
    fill(given.root, given.version, given.url, datetime.date.today().isoformat())
    print(LEFT.format(version=given.version))
