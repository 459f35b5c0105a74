"""Training's process keeps what it frees: later steps ask the kernel for no fresh pages."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from posbias.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def work():
    return [torch.zeros(300_000) for _ in range(20)]
work(), work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    given_back, kept = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("given back", "kept")
    )
    assert 10 * kept < given_back
