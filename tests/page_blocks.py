"""The fenced blocks of a page, and running them as a reader would: verbatim and in order, in one empty directory.

`python` blocks of a page share their names. `bash` blocks are run line by line, each in a fresh process, where every
line calls posbias, else by bash. In `console` and `pycon` blocks what follows a command is its output, numbers aside. A
block of another language with a second word (```` ```yaml study.yaml ````) is saved under that name. An HTML comment
above a fence, which no reader sees, marks what is `slow`, or `not run: WHY`. Fences in braces
(```` ```{code-cell} ````) are the site's, and run by `make docs`.
"""

import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fresh import run_fresh

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("[!C]*.md"),
        ROOT / "CONTRIBUTING.md",
        *(page for name in ("docs", "benchmarks", "examples", "studies") for page in (ROOT / name).rglob("*.md")),
    ]
)
BESIDE = ("examples", "studies", "benchmarks")
"""Directories of a clone that commands name."""
LANGUAGES = ("python", "pycon", "bash", "console", "yaml", "text")
_FENCE = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?(?: ?[kMG]?B\b)?")


@dataclass(frozen=True)
class Block:
    """One fence."""

    page: Path
    line: int
    """Of its first line of text."""
    language: str
    file: str | None
    """What a reader saves it as."""
    mark: str | None
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}: {self.text.splitlines()[0]}"

    @property
    def not_run(self) -> str | None:
        """Why it is not run, if so."""
        return self.mark.removeprefix("not run: ") if (self.mark or "").startswith("not run: ") else None

    @property
    def commands(self) -> list[str]:
        """Shell commands, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and line[0] != "#"] if self.language == "bash" else []


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, _, file = match["info"].partition(" ")
        if language.startswith("{"):
            continue
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(page, line, language, file or None, match["mark"], match["text"]))
    return found


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run one block in the current directory; `names` is what the page's Python has defined so far."""
    if block.file is not None:
        Path(block.file).write_text(block.text)
    elif block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)
    elif block.language == "pycon":
        _run_prompts(block, names)
    elif block.language == "console":
        _run_console(block)
    elif block.language == "bash" and all(_is_plain(command) for command in block.commands):
        for command in block.commands:
            done = run_fresh(command)
            assert done.returncode == 0, f"{block.name}: {command}: {done.stderr}"
    elif block.language == "bash":
        _run_bash(block)


def _is_plain(command: str) -> bool:
    """Whether a line is one call of posbias, without pipes and the like."""
    lexer = shlex.shlex(command, punctuation_chars=True, posix=True)
    words = list(lexer)
    return words[0] == "posbias" and not any(set(word) <= set("();<>|&") for word in words)


def _run_bash(block: Block) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", block.text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block.name}: {done.stderr}"


def _run_console(block: Block) -> None:
    for piece in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, shown = piece.partition("\n")
        done = run_fresh(command)
        _assert_shown(shown, done.stdout + done.stderr, block)
        assert (done.returncode != 0) == shown.startswith("posbias: "), f"{block.name}: {done.stderr}"


def _run_prompts(block: Block, names: dict[str, Any]) -> None:
    """`>>> EXPRESSION`, then the error or the value that a Python prompt shows."""
    for piece in re.split(r"^>>> ", block.text, flags=re.M)[1:]:
        expression, _, shown = piece.partition("\n")
        try:
            found = repr(eval(expression, names))
        except Exception as error:
            found = "".join(traceback.format_exception_only(error)).replace(f"{type(error).__module__}.", "")
        _assert_shown(shown, found, block)


def _assert_shown(shown: str, found: str, block: Block) -> None:
    """What a page shows is what comes out, but for numbers, line breaks and what it leaves out as `...`."""
    flat = _NUMBER.sub("#", " ".join(found.split()))
    for part in shown.split("..."):
        wanted = _NUMBER.sub("#", " ".join(part.split()))
        assert wanted in flat, f"{block.name}: not shown: {wanted}\nbut: {flat}"
