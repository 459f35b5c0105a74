"""Conditions, caveats and odd samples in any run's report."""

import re
from collections.abc import Mapping
from typing import Any

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
