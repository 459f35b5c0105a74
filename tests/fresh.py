"""Commands and code in fresh processes, as a user starts them: nothing of posbias is imported before.

What posbias rests on (torch, transformers ...) takes seconds to import: one process has it, and each run is a fork.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import json, os, resource, runpy, sys
import jaxtyping, numba, pydantic, rich.console, scipy.optimize, scipy.stats, torch, transformers, typer
from transformers import AutoModelForCausalLM, AutoTokenizer

assert "posbias" not in sys.modules
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in enumerate((os.devnull, asked["out"], asked["error"])):
            os.dup2(os.open(name, os.O_RDWR), number)
        os.chdir(asked["directory"])
        if asked["seconds"]:
            resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"], asked["seconds"] + 5))
        sys.argv = asked["arguments"]
        if sys.argv[0] == "posbias":
            runpy.run_module("posbias", run_name="__main__")
        else:
            exec(compile(sys.argv[1], "fresh", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
OUT_OF_TIME = -24
"""Exit code of what had no more processor time."""


@cache
def _server() -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_fresh(command: str | list[str], *, seconds: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run `posbias ...`, or `python CODE`, in the current directory; it is ended after `seconds` of processor time."""
    arguments = shlex.split(command, comments=True) if isinstance(command, str) else command
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        asked = {"arguments": arguments, "directory": os.getcwd(), "out": out.name, "error": error.name}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**asked, "seconds": seconds}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, Path(out.name).read_text(), Path(error.name).read_text())
