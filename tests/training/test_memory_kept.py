"""Training's process keeps what it frees: later steps ask the kernel for no fresh pages."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from posbias.memory import keep_freed_memory
def work():
    return [torch.zeros(300_000) for _ in range(20)]
def new_pages():
    work(), work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = new_pages()
keep_freed_memory()
print(given_back, new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert 10 * kept < given_back
