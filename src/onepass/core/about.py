"""Describe versions and machine for `onepass doctor`, bug reports and benchmark records, without user or host names."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

SETTINGS = (
    "ONEPASS_BACKEND", "ONEPASS_COMPILED_NORMS", "ONEPASS_REPLAY", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None without any."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def nvidia_driver() -> str | None:
    """Return the NVIDIA driver's version as nvidia-smi reports it; None without the tool or a working driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.splitlines()[0].strip() if result.stdout.strip() else None


def versions() -> dict[str, str | None]:
    """Return every version that decides what runs; None for a missing component."""
    from onepass import __version__

    return {
        "onepass": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": distribution_version("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
        "cuda": torch.version.cuda or (f"HIP {torch.version.hip}" if torch.version.hip else None),
        "driver": nvidia_driver(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def settings() -> dict[str, str]:
    """Return the environment variables that are set and change which path runs."""
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def cpu_name() -> str:
    """Return the processor's model name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    # /proc exists on Linux only
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = match[1].strip() if match else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def device_name(device: torch.device) -> str:
    """Return the model name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def dtype_name(dtype: torch.dtype) -> str:
    """Shorten a dtype's name: "bfloat16", not "torch.bfloat16"."""
    return str(dtype).removeprefix("torch.")
