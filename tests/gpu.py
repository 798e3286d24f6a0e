"""Every test marked gpu, in several processes a GPU, with a record of the counts: `make gpu`.

Each process sees one GPU. Tests that need two, and start processes of their own, run by `--sharded`, side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]


def counts(report: Path) -> dict[str, object]:
    """Return how many tests of a JUnit report passed, failed and were skipped, and the names of those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": names}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/gpu.py", description=__doc__)
    parser.add_argument("--record", type=Path, help="write counts, versions and seconds to this JSON file")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 14), help="processes a GPU (%(default)s)")
    parser.add_argument("--sharded", action="store_true", help="those that need two GPUs or more alone")
    parser.add_argument("tests", nargs="*", help="files and folders (default: all)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    several = ["tests/sharded", "tests/optim/test_lion_gpu.py::test_other_devices_are_guarded"]
    chosen = args.tests or (several if args.sharded else ["tests", "--ignore=tests/sharded"])
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    seen = [""] if args.sharded else [f"//env:CUDA_VISIBLE_DEVICES={gpu}" for gpu in given.split(",")]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--dist", "worksteal", f"--junitxml={report}", *chosen,
            *(f"--tx={args.jobs}*popen{one}" for one in seen),
        ]  # fmt: skip
        # one thread each, also to compile: the processes share the cores
        alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        code = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, **alone}).returncode
        found = counts(report)
    record = {
        "gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), "torch": torch.__version__,
        "triton": version("triton"), "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "tests": chosen, "jobs": args.jobs, "seconds": round(time.monotonic() - begun), **found,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if args.record:
        args.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
