"""A process that ends with another one, also while it holds the interpreter's lock."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import ctypes, os, sys
from deepinfer_backend._core import end_process_with
end_process_with(os.pidfd_open(int(sys.argv[1])))
print("stuck", flush=True)
ctypes.PyDLL(None).sleep(600)  # no other thread of Python's runs meanwhile
"""


def test_it_ends_while_it_holds_the_interpreters_lock() -> None:
    with (
        subprocess.Popen(["sleep", "600"]) as other,
        subprocess.Popen([sys.executable, "-c", STUCK, str(other.pid)], stdout=subprocess.PIPE) as stuck,
    ):
        assert stuck.stdout is not None and stuck.stdout.readline() == b"stuck\n"
        assert stuck.poll() is None
        other.kill()
        assert stuck.wait(5) == 1
