"""`make quick`: print the tests that concern what changed since the branch left BASE, work in progress included.

A file of tests stands for itself. A source file stands for the tests of its folder, which `tests` mirrors; an
operator's also for its contract, of this operator alone. What everything rests on (core, the tests' own helpers,
pyproject.toml) stands for core and contract.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
SHARED = ["tests/contract", "tests/core", "tests/test_import.py"]


def tests_for(name: str) -> list[str]:
    """Paths of the tests to run when this file changed; some may be absent."""
    path = PurePosixPath(name)
    match path.parts:
        case ("src", *_, "README.md") | ("docs", *_) | ("mkdocs.yml",):
            return ["tests/test_docs.py", "tests/test_readme.py"]
        case ("src", "onepass", "core", "sharding.py"):
            return [*SHARED, "tests/sharded"]
        case ("src", "onepass", "nn", "calls.py" | "whole_rows.py"):
            return ["tests/nn", "tests/sharded"]
        case ("src", "onepass", "ops", operator, "op.py" | "sharding.py"):
            return [f"tests/ops/{operator}", "tests/contract", "tests/sharded"]
        case ("src", "onepass", "optim", "sharded.py" | "state.py" | "step.py"):
            return ["tests/optim", "tests/sharded"]
        case ("src", "onepass", "ops", "_shared", *_):
            return ["tests/ops", "tests/contract"]
        case ("src", "onepass", "ops", operator, *_):
            return [f"tests/ops/{operator}", "tests/contract"]
        case ("src", "onepass", "fused", *_):
            return ["tests/fused", "tests/nn"]
        case ("src", "onepass", package, _, *_) if package != "core":
            return [f"tests/{package}"]
        case ("benchmarks" | "research" as package, *_):
            return [f"tests/{package}"]
        case ("tests", *_, file) if file.startswith("test_"):
            return [name]
        case ("tests", folder, _, *_):
            return [f"tests/{folder}"]
        case ("examples", "sparse_attention.py"):
            return ["tests/test_examples.py", "tests/test_sparse_attention.py"]
        case ("examples", *_):
            return ["tests/test_examples.py"]
        case (".github", *_) | ("CITATION.cff" | ".pre-commit-config.yaml" | "Makefile" | "CHANGELOG.md",):
            return ["tests/test_project_files.py"]
        case ("README.md",):
            return ["tests/test_readme.py"]
        case ("src" | "tests", *_) | ("pyproject.toml",):
            return SHARED
        case _:
            return []


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
