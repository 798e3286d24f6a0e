"""Random argument vectors for every command: never a traceback, exit code 0 or 2 (doctor: also 1)."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import strategies as st

from onepass.train import data

from .engine import Case, Property
from .files import no_pictures
from .here import call, call_apart, manners, scratch

WORDS = (
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "2",
    "8",
    "1e9",
    "1e999",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "１２",
    "1_000",
    "99999999999999999999",
    "a.txt",
    "missing",
    "in",
    "in/a.txt",
    "run",
    ".",
    "/",
    "/proc/self/mem",
    "/dev/null",
    "/root/x",
    "é\n",
    "\x1b[31mred",
    "x" * 300,
    "fp32",
    "bf16",
    "cpu",
    "cuda",
    "auto",
    "norm",
    "lion",
    "soft_topk",
    "forward",
    "backward",
    "step",
    "1/2",
    "2/1",
    "0/0",
    "a/b",
    "1/99999999999999999999",
    "learned",
    "random",
    "none",
    "light",
    "dense",
    "oracle",
    "planted",
    "text",
    "report",
    "masked",
    "causal",
    "small",
    "full",
    "gpu",
    "--help",
    "--out",
    "@x",
    "*",
    "%s",
    "{}",
)
OPTIONS = {
    "train": (
        "--out",
        "--preset",
        "--task",
        "--device",
        "--route",
        "--steps",
        "--seed",
        "--batch",
        "--seq",
        "--dim",
        "--blocks",
        "--lr",
        "--checkpoint-every",
        "--resume",
        "--force",
    ),
    "show": ("--out", "--bytes"),
    "ablate": (
        *("--task", "--start", "--arm", "--seed", "--size", "--steps", "--seconds", "--device", "--out", "--data"),
        *("--equal-time", "--n", "--dim", "--heads", "--batch", "--budget", "--tune", "--rate", "--part"),
        *("--window", "--share"),
    ),
    "bench": (
        "--json",
        "--list",
        "--stage",
        "--case",
        "--part",
        "--dtype",
        "--device",
        "--quick",
        "--no-compile",
        "--limit",
        "--merge",
        "--report",
    ),
    "doctor": ("--bogus", "--help"),
}
# what keeps an argument vector that is accepted from working for hours: the last of an option counts
SHORT = {
    "train": (
        "--steps",
        "1",
        "--dim",
        "8",
        "--seq",
        "8",
        "--batch",
        "1",
        "--blocks",
        "1",
        "--preset",
        "cpu",
        "--device",
        "cpu",
    ),
    "show": (),
    "ablate": ("--bogus",),
    "bench": ("--list",),
    "doctor": ("--bogus",),
}


@st.composite
def _cases(draw: Any, device: str) -> Case:
    command = draw(st.sampled_from(("train", "train", "show", "ablate", "bench", "bench", "doctor", "?")))
    words = st.sampled_from(WORDS) | st.text(
        st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=8
    )
    if command == "?":
        return {"op": command, "arguments": draw(st.lists(words, max_size=4)), "apart": False}
    option = st.sampled_from(OPTIONS[command])
    arguments = [command]
    for _ in range(draw(st.integers(0, 5))):
        arguments += draw(
            st.one_of(words.map(lambda w: [w]), option.map(lambda o: [o]), st.tuples(option, words).map(list))
        )
    return {"op": command, "arguments": arguments, "apart": draw(st.integers(0, 80)) == 80}


def check_command(case: Case, device: str) -> None:
    """The command's manners, in a directory with a text or two."""
    command, arguments = case["op"], list(case["arguments"])
    if command in SHORT:
        # after "--" options are paths: nothing would keep the command short
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = [*arguments[:cut], *SHORT[command], *arguments[cut:]]
    with scratch() as home:
        (home / "in").mkdir()
        for name in ("a.txt", "b.py", "c.py"):
            (home / "in" / name).write_text(f"{name} the quick brown fox jumps over the lazy dog\n" * 9)
        if case["apart"]:
            answer = call_apart(arguments, home)
        else:
            # without a path a run reads all of the standard library, and draws: half a minute
            with mock.patch.object(data, "standard_library", return_value=home / "in"), no_pictures():
                answer = call(arguments, home)
        manners(answer, f"onepass {command}", (0, 1, 2) if command == "doctor" else (0, 2))


PROPERTIES = [Property("command lines", _cases, check_command, ("cpu",), burst=25)]
