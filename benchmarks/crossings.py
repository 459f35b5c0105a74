"""Files and functions of posbias that one `measure` and one `audit` enter: what a reader crosses who follows a prompt.

`python benchmarks/crossings.py`. Counted three times: the whole command, imports included; from the moment the prompts
are ready until the record is saved; and while one prompt after another is measured. Lambdas, comprehensions and nested
generators belong to the function around them.
`--list measure` prints what is entered between the two moments.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import posbias

ROOT = Path(posbias.__file__).parent
COMMANDS = {
    "measure": "measure demo --length 32 --count 2 --kinds jacobian",
    "audit": "audit demo --length 32 --count 2",
}
BEGIN, END = "load_prompts", "Record.save"
"""The returns of these functions bound the second count."""
UNIT = "UnitWork.compute"
"""The third count is of what this function calls."""


class Crossings:
    """Code objects of posbias that were entered, in order."""

    def __init__(self) -> None:
        self.everything: dict[CodeType, None] = {}
        self.between: dict[CodeType, None] = {}
        self.of_a_prompt: dict[CodeType, None] = {}
        self._inside = self._measuring = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)):
            return
        if event == "call":
            self.everything[code] = None
            if self._inside:
                self.between[code] = None
            self._measuring |= code.co_qualname == UNIT
            if self._measuring:
                self.of_a_prompt[code] = None
        elif event == "return" and code.co_qualname == UNIT:
            self._measuring = False
        elif event == "return" and code.co_qualname in (BEGIN, END):
            self._inside = code.co_qualname == BEGIN


def functions(entered: dict[CodeType, None]) -> list[str]:
    """Where they are and what they are called, without bodies of modules and classes."""
    optimised: Callable[[CodeType], bool] = lambda code: bool(code.co_flags & 1)  # noqa: E731
    named = [code for code in entered if optimised(code) and not code.co_name.startswith("<")]
    return list(dict.fromkeys(f"{Path(code.co_filename).relative_to(ROOT)}: {code.co_qualname}" for code in named))


def trace(verb: str, *, listed: bool) -> None:
    """Run one verb in this process and print its counts."""
    from posbias.cli import main

    crossings = Crossings()
    with tempfile.TemporaryDirectory() as directory:
        sys.argv = ["posbias", *COMMANDS[verb].split(), "--out", directory]
        sys.setprofile(crossings)
        try:
            main()
        except SystemExit as end:
            sys.setprofile(None)
            if end.code:
                raise
    counted = {"in all": crossings.everything, "of the work": crossings.between, "of a prompt": crossings.of_a_prompt}
    for name, entered in counted.items():
        found = functions(entered)
        files = {entry.partition(":")[0] for entry in found}
        print(f"{verb:8} {name:12} {len(files):4} files {len(found):5} functions", file=sys.stderr)
    if listed:
        print("\n".join(sorted(functions(crossings.between))), file=sys.stderr)


if __name__ == "__main__":
    wanted = [word for word in sys.argv[1:] if word in COMMANDS]
    if wanted and "--here" in sys.argv:
        trace(wanted[0], listed="--list" in sys.argv)
    else:
        for verb in wanted or COMMANDS:
            flags = [word for word in sys.argv[1:] if word == "--list"]
            subprocess.run([sys.executable, __file__, verb, "--here", *flags], check=True, stdout=subprocess.DEVNULL)
