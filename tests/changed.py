"""`make quick`: print the tests that concern what changed since the branch left BASE, work in progress included.

A file of tests stands for itself. A source file stands for the tests of its folder, which `tests` mirrors; an
operator's also for its contract, of this operator alone. What everything rests on (core, the tests' own helpers,
pyproject.toml) stands for core and contract.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
SHARED = "tests/contract tests/core tests/test_import.py"
# the tests of a file are those of the first pattern that its path has
TABLE = {
    r"src/.*README\.md|docs/.*|mkdocs\.yml": "tests/test_docs.py tests/test_readme.py",
    r"src/onepass/core/sharding\.py": f"{SHARED} tests/sharded",
    r"src/onepass/nn/(calls|whole_rows)\.py": "tests/nn tests/sharded",
    r"src/onepass/optim/(sharded|state|step)\.py": "tests/optim tests/sharded",
    r"src/onepass/ops/_.*": "tests/ops tests/contract",
    r"src/onepass/ops/(\w+)/(op|sharding)\.py": r"tests/ops/\1 tests/contract tests/sharded",
    r"src/onepass/ops/(\w+)/.*": r"tests/ops/\1 tests/contract",
    r"src/onepass/fused/.*": "tests/fused tests/nn",
    r"src/onepass/(?!core/)(\w+)/.*": r"tests/\1",
    r"(benchmarks|research|examples)/.*": r"tests/\1 tests/test_\1.py",
    r"(tests/(?:.*/)?test_.*)": r"\1",
    r"tests/(\w+)/.*": r"tests/\1",
    r"\.github/.*|CITATION\.cff|\.pre-commit-config\.yaml|Makefile|CHANGELOG\.md": "tests/test_project_files.py",
    r"README\.md": "tests/test_readme.py",
    r"(src|tests)/.*|pyproject\.toml": SHARED,
}


def tests_for(name: str) -> list[str]:
    """Paths of the tests to run when this file changed; some may be absent."""
    found = (match.expand(tests) for pattern, tests in TABLE.items() if (match := re.fullmatch(pattern, name)))
    return next(found, "").split()


def chosen(changed: list[str]) -> list[str]:
    """The tests of all these files, each once, those inside a chosen folder left out."""
    wanted = {test for name in changed for test in tests_for(name) if (ROOT / test).exists()}
    return sorted(t for t in wanted if not any(str(parent) in wanted for parent in PurePosixPath(t).parents))


def options(changed: list[str]) -> list[str]:
    """The option that limits contract tests to the operators that changed, where nothing else asks for them."""
    folders = set()
    for name in changed:
        match PurePosixPath(name).parts:
            case ("src", "onepass", "ops", folder, *_) if folder != "_shared":
                folders.add(folder)
            case _ if any(test.startswith("tests/contract") for test in tests_for(name)):
                return []
    return [f"--operators={','.join(sorted(folders))}"] if folders else []


def changed_since(base: str) -> list[str]:
    """Files that differ from where this branch left `base`, and files that git does not know yet."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}; make quick BASE=<branch> names another one")
        return done.stdout.splitlines()

    (start,) = git("merge-base", "HEAD", base)
    return git("diff", "--name-only", start) + git("ls-files", "--others", "--exclude-standard")


if __name__ == "__main__":
    files = changed_since(sys.argv[1])
    tests = chosen(files)
    print(*tests, *(options(files) if tests else ()))
