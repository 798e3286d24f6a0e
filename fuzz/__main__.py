"""Attack every property for some minutes with fresh seeds, in several processes; report what was found.

    PYTHONPATH=src python -m fuzz --minutes 10 --jobs 2
    PYTHONPATH=src python -m fuzz --device cuda --minutes 10 --jobs 12 --out fuzz.json
    PYTHONPATH=src python -m fuzz --device interpret          the Triton kernels, run by Triton's interpreter on the CPU
    PYTHONPATH=src python -m fuzz --replay fuzz-findings/….json

Exit code 0 when nothing was found (--replay: the case holds now), 1 when something was, 2 for a mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DEVICES = ("cpu", "cuda", "interpret")
FINDINGS = ROOT / "fuzz-findings"
OUT = ROOT / "benchmarks" / "results" / "cpu" / "raw" / "fuzz.json"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, metavar="X", help="how long to attack (default: 10)")
    add(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        metavar="N",
        help="processes (default: half of the cores)",
    )
    add(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="where tensors are; interpret: Triton's interpreter (default: cpu)",
    )
    add("--only", action="append", metavar="TEXT", help="only properties whose name contains TEXT; may be repeated")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the report (default: {OUT.relative_to(ROOT)} after a minute or more on a CPU)",
    )
    add("--findings", type=Path, default=FINDINGS, metavar="DIR", help="one JSON per finding (default: fuzz-findings)")
    add("--seed", type=int, help="of the first process; the others count up from it (default: fresh)")
    add("--replay", type=Path, metavar="FILE", help="run one finding again")
    add("--list", action="store_true", help="list the properties")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes <= 0 or args.jobs < 1:
        parser.error("--minutes must be > 0 and --jobs ≥ 1")
    if args.device == "interpret":
        # decided when a kernel is decorated, so before the first import
        os.environ["TRITON_INTERPRET"] = "1"
    if args.worker:
        from fuzz.work import work

        return work(args.worker, args.device, args.minutes * 60, args.seed, args.only)
    if args.replay:
        return replay(args.replay)
    if args.list:
        from fuzz.work import properties

        for prop in properties():
            print(f"{prop.name:24} {', '.join(prop.devices)}")
        return 0
    return attack(args)


def replay(path: Path) -> int:
    """Run a finding again: 1 when it still is one."""
    try:
        finding: dict[str, Any] = json.loads(path.read_text())
        case, device, name = finding["case"], finding["device"], finding["property"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"fuzz: {path} is no finding: {error!s:.100}", file=sys.stderr)
        return 2
    if device == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    from fuzz.engine import SkipCase, attempt
    from fuzz.work import properties, settle

    settle(device)
    prop = {p.name: p for p in properties()}.get(name)
    if prop is None:
        print(f"fuzz: there is no property {name!r}", file=sys.stderr)
        return 2
    try:
        again = attempt(prop, case, device)
    except SkipCase:
        again = None
    print(
        f"{finding['signature']}\nthen  {finding['message']}\n"
        f"now   {again['message'] if again else 'the promise holds'}"
    )
    return 1 if again else 0


def attack(args: argparse.Namespace) -> int:
    """Start the processes, gather what they found, write the report."""
    seed = random.SystemRandom().randrange(2**40) if args.seed is None else args.seed
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="onepass-fuzz-jobs-") as scratch:
        jobs = [Job(args, Path(scratch) / str(i), seed + i) for i in range(args.jobs)]
        try:
            while sum(job.alive() for job in jobs):
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("fuzz: interrupted; what is known so far:", file=sys.stderr)
            for job in jobs:
                job.stop()
        report = gather([part for job in jobs for part in job.parts()], args, seed, time.time() - started)
    from fuzz.engine import write_finding

    for finding in report["findings"]:
        finding["file"] = write_finding(finding, args.findings).name
    out = args.out or (OUT if args.device == "cpu" and args.minutes >= 1 and not args.only else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1, default=str) + "\n")
    show(report, out, args.findings)
    return 1 if report["findings"] or report["broken"] else 0


class Job:
    """One process of the attack, started again when a case kills it."""

    def __init__(self, args: argparse.Namespace, folder: Path, seed: int) -> None:
        self.args, self.folder, self.seed, self.turn = args, folder, seed, 0
        self.until = time.time() + 60 * args.minutes
        self.deaths: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Start a process for the time that is left."""
        self.here = self.folder / str(self.turn)
        self.here.mkdir(parents=True)
        minutes = max(0.02, (self.until - time.time()) / 60)
        command = [
            sys.executable,
            "-m",
            "fuzz",
            "--worker",
            str(self.here),
            "--minutes",
            str(minutes),
            "--device",
            self.args.device,
        ]
        command += ["--seed", str(self.seed + 1_000_003 * self.turn)]
        for text in self.args.only or ():
            command += ["--only", text]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        with open(self.here / "stderr", "wb") as errors:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def alive(self) -> bool:
        """Whether it still works; one that died is replaced."""
        code = self.process.poll()
        if code is None:
            if time.time() < self.until + 150:
                return True
            self.process.kill()
            code = self.process.wait()
        if code == 0 or any(death["turn"] == self.turn for death in self.deaths):
            return False
        # 3: it said itself what happened, and needs a fresh start
        if code != 3:
            self.deaths.append({"turn": self.turn, **self._last_words(code)})
        self.turn += 1
        if time.time() > self.until - 5 or self.turn > 50:
            return False
        self.start()
        return True

    def _last_words(self, code: int) -> dict[str, Any]:
        try:
            last = json.loads((self.here / "now.json").read_text())
        except (OSError, ValueError):
            last = {"property": "start", "case": {}}
        errors = (self.here / "stderr").read_bytes()[-1500:].decode("utf-8", "replace")
        what = f"{last['case'].get('op', '')} ended the process"
        return {
            "property": last["property"], "signature": f"{last['property']}: {what}", "device": self.args.device,
            "message": f"exit code {code}: {errors[-300:]}", "facts": {"stderr": errors}, "case": last["case"],
        }  # fmt: skip

    def stop(self) -> None:
        """Ask the process to end."""
        self.process.terminate()
        self.process.wait()

    def parts(self) -> list[dict[str, Any]]:
        """What its processes left."""
        found = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*/result.json"))]
        return [*found, *({"findings": [death]} for death in self.deaths)]


def gather(parts: list[dict[str, Any]], args: argparse.Namespace, seed: int, seconds: float) -> dict[str, Any]:
    """One report of all processes."""
    import torch

    counts: dict[str, dict[str, float]] = {}
    findings: dict[str, dict[str, Any]] = {}
    left_out, broken = {}, {}
    for part in parts:
        left_out |= part.get("left_out", {})
        broken |= part.get("broken", {})
        for name, numbers in part.get("counts", {}).items():
            own = counts.setdefault(name, {"cases": 0, "outside": 0, "seconds": 0.0})
            for key, value in numbers.items():
                own[key] = round(own[key] + value, 1)
        for finding in part["findings"]:
            known = findings.setdefault(finding["signature"], {**finding, "times": 0})
            known["times"] += finding.get("times", 1)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    return {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": sys.version.split()[0],
        "device": f"{args.device}: {device}", "minutes": round(seconds / 60, 2), "jobs": args.jobs, "seed": seed,
        "cases": sum(int(c["cases"]) for c in counts.values()), "counts": dict(sorted(counts.items())),
        "left_out": left_out, "broken": broken, "findings": sorted(findings.values(), key=lambda f: f["signature"]),
    }  # fmt: skip


def show(report: dict[str, Any], out: Path | None, folder: Path) -> None:
    """A short table."""
    print(f"{'property':24} {'cases':>9} {'outside':>8} {'seconds':>8}")
    for name, own in report["counts"].items():
        print(f"{name:24} {int(own['cases']):9,} {int(own['outside']):8,} {own['seconds']:8.0f}")
    for name, why in report["left_out"].items():
        print(f"{name:24} left out: {why}")
    for name, why in report["broken"].items():
        print(f"{name:24} BROKEN: {why[:200]}")
    for finding in report["findings"]:
        print(
            f"FINDING  {finding['signature']}  ({finding['times']} times)\n"
            f"         {finding['message'][:200]!r}\n         {folder / finding['file']}"
        )
    print(
        f"{report['cases']:,} cases, {len(report['findings'])} findings, seed {report['seed']}"
        + (f"; report in {out}" if out else "")
    )


if __name__ == "__main__":
    sys.exit(main())
