"""The files around the code agree with it: versions, pins, commands and workflows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import onepass

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TEMPLATES = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == onepass.__version__
    assert f"[{onepass.__version__}] - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == "MIT"


def test_pre_commit_runs_the_linter_of_the_gate() -> None:
    pins = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in read(ROOT / ".pre-commit-config.yaml")["repos"]}
    assert f'"ruff=={pins["ruff-pre-commit"].removeprefix("v")}"' in PYPROJECT


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_ask_for_the_doctor(path: Path) -> None:
    fields = {field["id"]: field for field in read(path)["body"]}
    assert fields["doctor"]["validations"]["required"]
    assert all(field["attributes"]["label"] for field in fields.values())


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    jobs = read(path)["jobs"]
    assert all(job["timeout-minutes"] <= 60 for job in jobs.values())
    called = [step["run"] for job in jobs.values() for step in job["steps"] if step.get("run", "").startswith("make ")]
    assert called
    for command in called:
        assert [word for word in command.split()[1:] if re.fullmatch(r"[a-z-]+", word) and word not in targets] == []


def test_the_release_keeps_no_secret() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    assert read(ROOT / ".github/workflows/release.yml")["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    # the check of the tag finds the version where it stands
    assert re.search(r'__version__ = "(.+)"', (ROOT / "src/onepass/__init__.py").read_text())[1] == onepass.__version__


def test_every_promise_names_its_test() -> None:
    """docs/reliability.md: each row of its first three tables names tests that exist, a target or a record."""
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    rows = [line for line in page.partition("## Versions")[0].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| promise ")]
    assert len(rows) > 15
    for row in rows:
        folder = ROOT
        for name in re.findall(r"`(tests/[\w/.]+|test_\w+\.py)`", row):
            # a bare name stands beside the one before it
            path = ROOT / name if "/" in name else folder / name
            assert path.exists(), f"{name}: {row}"
            folder = path.parent
        assert folder != ROOT or "`make " in row or "(../benchmarks/results/" in row, row
