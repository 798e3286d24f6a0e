"""The files around the code agree with it: versions, pins, commands and workflows."""

from __future__ import annotations

import re
import subprocess
import sys
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
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
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


def test_a_release_fills_in_where_it_is(tmp_path: Path) -> None:
    """Twice, as a second run replaces the first; what it wrote is read by who reads it."""
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "CHANGELOG.md", "src/onepass/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    command = [sys.executable, ROOT / "docs/site/release.py", "--root", tmp_path]
    for version in ("7.8.9", "7.9.0"):
        said = subprocess.check_output([*command, version, f"https://h/o/of-{version}"], text=True)
    assert "tag v7.9.0" in said
    text, url = "".join(path.read_text() for path in tmp_path.rglob("*.*")), "https://h/o/of-7.9.0"
    for line in (f"repository-code: {url}", f"repo_url: {url}", "[project.urls]", f'Issues = "{url}/issues"',
                 "version: 7.9.0", '__version__ = "7.9.0"'):  # fmt: skip
        assert text.count(f"{line}\n") == 1, line
    assert f"[7.9.0] - {read(tmp_path / 'CITATION.cff')['date-released']}" in text
    assert "of-7.8.9" not in text
    for wrong in (["7.9", url], ["7.9.0", "owner/name"]):
        assert subprocess.run([*command, *wrong], capture_output=True, check=False).returncode == 1
