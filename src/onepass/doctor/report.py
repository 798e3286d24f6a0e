"""The plain-text block for a bug report, without names of users, hosts or directories."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Sequence

import torch

from onepass.core.about import dtype_name
from onepass.core.launch import path

from .facts import Device
from .selftest import Verdict

_PATH = re.compile(r"(?<![\w./])(?:~|[A-Za-z]:)?(?:[\\/][\w.+@-]+)+[\\/]([\w.+@-]+)")


def scrub(text: str) -> str:
    """Remove directories, the user's name and the host's name from a text; file names stay."""
    text = _PATH.sub(r".../\1", text)
    try:
        names = [getpass.getuser(), platform.node()]
    except (KeyError, OSError):
        # this user id has no entry in the password database, so there is no name to remove
        names = [platform.node()]
    for name in names:
        if len(name) > 2 and name not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


def outcome(verdict: Verdict) -> str:
    """Return the outcome of a self-test in a few words."""
    tried = "all samples" if verdict.ran == verdict.samples else f"{verdict.ran} samples (--full tries all)"
    if verdict.problems:
        return f"WRONG in {len(verdict.problems)} of {verdict.ran}"
    if not verdict.ran:
        return "no time (use --full)"
    return f"ok in {tried}, error up to {100 * verdict.worst:.0f} % of the tolerance"


def problem_lines(verdict: Verdict) -> list[str]:
    """Return a line per problem of a self-test, with operator, device and dtype."""
    where = f"{verdict.operator} on {verdict.device} in {dtype_name(verdict.dtype)}"
    return [f"{where}: {problem}" for problem in verdict.problems]


def block(
    versions: dict[str, str | None], devices: Sequence[Device], settings: dict[str, str], verdicts: Sequence[Verdict],
    problems: Sequence[str], advice: Sequence[str],
) -> str:  # fmt: skip
    """Return all findings as ASCII text without colours, paths and names."""
    lines = ["onepass doctor", ", ".join(f"{name} {version or 'none'}" for name, version in versions.items())]
    lines += [f"{d.device}: {d.name}; {d.details}" for d in devices]
    lines += [f"{name}={value}" for name, value in settings.items()]
    for verdict in verdicts:
        taken, why = path(torch.empty(0, device=verdict.device, dtype=verdict.dtype))
        place = f"{verdict.operator} {verdict.device} {dtype_name(verdict.dtype)}"
        lines.append(f"{place}: {taken} ({why}); {outcome(verdict)}")
    lines += [f"problem: {p}" for p in problems] or ["problems: none"]
    lines += [f"advice: {a}" for a in advice]
    return scrub("\n".join(lines)).encode("ascii", "replace").decode()
