"""Conditions, caveats and odd samples in any run's report, as text that steers no terminal or page."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from posbias.errors import printable
from posbias.runs.records import Record
from posbias.tasks.language.base import NOTICES

DEMO_NAME = "SmolLM2-135M-Instruct"
NOTICED = {
    "gold_without_answer": "a model that reads only that passage cannot be right there",
    "gold_repeated": "at every position the answer can be had elsewhere, too, so less depends on the position",
    "answer_elsewhere": "a right answer need not come from the passage that moves, so less depends on the position",
    "control_tokens": "they were read as ordinary text, never as the tokens",
    "thoughts_left_out": "it answers without having read them",
}
"""What follows from a notice (`NOTICES` says what it is)."""
LONGEST_LIST = 8
"""Values of a list that the conditions of a run write out; a longer one is cut, with its length given."""


def shown_record(record: Record) -> Record:
    """The record as a person may see it: no text in it, nor the name of an array, steers a terminal or a page.

    Everything that is drawn or printed of a record is made of this copy.
    """
    copied = copy.copy(record)
    for name, value in vars(record).items():
        setattr(copied, name, _printable(value))
    return copied


class _Escaped(str):
    """A text as it may be shown; spelled for Python (`repr`) it is still the one that it stands for."""

    text: str

    def __repr__(self) -> str:
        return repr(self.text)


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        escaped = _Escaped(printable(value))
        escaped.text = str(value)
        return escaped
    if isinstance(value, Mapping):
        return {_printable(name): _printable(entry) for name, entry in value.items()}
    return [_printable(entry) for entry in value] if isinstance(value, list | tuple) else value


def real_name(title: str) -> str:
    """A title in which the demo model goes by the name that its makers gave it."""
    return re.sub(r"(?<![\w/-])demo(?![\w/-])", DEMO_NAME, title)


def caveats_of(record: Record) -> tuple[str, ...]:
    """Warnings about the model (an encoding that is not the published one), the theories and the prompts."""
    responder = record.resolved.get("responder") or {}
    model = record.resolved.get("model") or responder.get("model")
    of_model = model.get("caveats", ()) if isinstance(model, Mapping) else ()
    caveats = (*of_model, *record.scalars.get("caveats", ()), *_spelled_by_prompts(record))
    return tuple(dict.fromkeys(map(str, caveats)))


def sample_notices(record: Record) -> list[str]:
    """Oddities of the samples of an evaluation, or of a run that rests on one."""
    here = (record.resolved.get("responder") or {}).get("kind") == "local"
    return notice_sentences(record.scalars.get("notices") or {}, count=record.resolved.get("count"), here=here)


def notice_sentences(notices: Mapping[str, Any], *, count: int | None, here: bool, of: str = "") -> list[str]:
    """Oddities of samples of a file, one sentence each; the layout is that of `evaluation.samples.notices_of`.

    Args:
        notices: By name, the numbers of samples.
        count: Number of all samples; None: not known.
        here: True if the model ran in this process, which reads control tokens in texts as ordinary text.
        of: The run, if a record is made of several.
    """
    sentences = []
    for name, entry in notices.items():
        samples = entry["samples"]
        numbers = ", ".join(map(str, samples[:LONGEST_LIST])) + (" ..." if len(samples) > LONGEST_LIST else "")
        tokens = f" ({_quoted(entry['tokens'])})" if "tokens" in entry else ""
        after = NOTICED[name]
        if name == "control_tokens" and not here:
            after = "it is not known whether whatever runs the model reads them as ordinary text"
        total = "" if count is None else f" of {count}"
        sentences.append(f"{of}In {len(samples)}{total} samples (number {numbers}) {NOTICES[name]}{tokens}: {after}.")
    return sentences


def _spelled_by_prompts(record: Record) -> list[str]:
    """Control tokens that the texts of prompts spell, of a measurement or of each subject of an audit."""
    prompts = record.resolved.get("prompts")
    tokens = prompts.get("control_tokens") if isinstance(prompts, Mapping) else None
    return [f"The prompts spell control tokens ({_quoted(tokens)}): {NOTICED['control_tokens']}."] if tokens else []


def _quoted(tokens: Mapping[str, int]) -> str:
    texts = [f"{token!r} {times} times" if times > 1 else repr(token) for token, times in tokens.items()]
    return ", ".join(texts[:LONGEST_LIST]) + (" ..." if len(texts) > LONGEST_LIST else "")


def conditions_of(record: Record) -> dict[str, str]:
    """Model, prompts, seeds and versions as label and text, nested tables written out."""
    resolved = {
        key: value for key, value in record.resolved.items() if key not in ("command", "title", "related", "curves")
    }
    return {
        **_written_out(resolved),
        **{f"seed: {name}": str(seed) for name, seed in record.seeds.items()},
        **_written_out({"environment": record.environment}),
        "finished": record.created,
        "run": record.run_id,
    }


def _written_out(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            flat.update(_written_out(value, prefix=f"{prefix}{name}: "))
        elif isinstance(value, list | tuple):
            if not value:
                continue
            texts = [f"{entry:.4g}" if isinstance(entry, float) else str(entry) for entry in value[:LONGEST_LIST]]
            flat[label] = ", ".join(texts)
            if len(value) > LONGEST_LIST:
                flat[label] += f", ... ({len(value)} values)"
        elif value is not None and value != "":
            flat[label] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return flat
