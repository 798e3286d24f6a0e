"""Installed versions and devices, and their faults, found without running an operator."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from onepass.core.about import cpu_name, one_line

# oldest supported versions: the oldest that tests run with
LEAST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True)
class Device:
    """One device as doctor shows it."""

    device: torch.device
    name: str
    details: str


def numbers(version: str) -> tuple[int, ...]:
    """Parse a version: "2.11.0+cu130" → (2, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match[0].split(".")) if match else ()


def devices() -> tuple[list[Device], list[str]]:
    """Return the CPU and every usable CUDA device, and a line for each device that torch counts but can't use."""
    usable = [Device(torch.device("cpu"), cpu_name(), f"torch uses {torch.get_num_threads()} threads")]
    unusable = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        try:
            about = torch.cuda.get_device_properties(index)
            torch.zeros(1, device=device).cpu()
        except Exception as error:
            unusable.append(f"{device} can't be used: {one_line(error)}")
            continue
        details = (
            f"{about.multi_processor_count} SMs, {about.total_memory / 2**30:.0f} GiB, "
            f"capability {about.major}.{about.minor}"
        )
        usable.append(Device(device, about.name, details))
    return usable, unusable


def problems(versions: dict[str, str | None]) -> list[str]:
    """Return a line for each installed version that is too old."""
    lines = []
    for name, least in LEAST.items():
        version = versions.get(name)
        oldest = ".".join(map(str, least))
        if version is not None and numbers(version) < least:
            lines.append(f"{name} {version} is older than {oldest}: pip install --upgrade {name}")
    return lines


OLDEST = (8, 0)  # compute capability that the kernels are written for


def advice(versions: dict[str, str | None]) -> list[str]:
    """Return a line for each thing that works but could be faster."""
    lines = []
    if torch.cuda.is_available() and versions.get("triton") is None:
        lines.append("Triton is not installed: CUDA tensors take the slower torch path (pip install triton)")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        if torch.version.hip is None and capability < OLDEST:
            oldest, actual = (f"{major}.{minor}" for major, minor in (OLDEST, capability))
            lines.append(
                f"cuda:{index} has compute capability {actual}: the kernels are written for {oldest} and newer; if one "
                "fails, ONEPASS_BACKEND=torch takes plain torch operations"
            )
    if not torch.cuda.is_available() and versions.get("driver") is not None:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch can't use it"
        lines.append(f"there is an NVIDIA driver ({versions['driver']}), but {reason}")
    return lines
