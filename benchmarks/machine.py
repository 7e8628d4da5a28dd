"""Which machine this is, and which state of the project runs on it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from benchmarks.engines.catalogue import machine_has_bfloat16
from benchmarks.results import Machine

_ROOT = Path(__file__).parents[1]


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        num_cores=os.cpu_count() or 1,
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        has_bfloat16=machine_has_bfloat16(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def commit() -> str:
    """Empty outside of a git repository; `+` where files have changed since."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    """Virtual machines often hide the model's number in the name: family and model tell the generation."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    name = fields.get("model name", "unknown processor")
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name
