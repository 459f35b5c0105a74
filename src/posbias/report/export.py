"""The card that lies beside an exported method, and the commands by which other programs load it."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.mitigation.judging.verdicts import Verdict
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.trial.result import ArmResult, MitigationTrial
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.weights import weights_sha256
from posbias.report.evaluate import measure_words
from posbias.report.layout import caveats_of
from posbias.report.mitigate_wording import reasons, seconds_each, text_change, warnings, words
from posbias.version import __version__

GGUF = ".gguf"
LARGEST_RANK, LARGER_RANKS = 16, (32, 64, 128, 256, 512)
"""Of adapters that vLLM serves unasked, and those that it can be asked for, each for all ranks below it."""


@dataclass(frozen=True, eq=False)
class Card:
    """The facts of an exported method."""

    method: Adapter
    model: HuggingFaceModel
    how: Mapping[str, Any]
    """How it was fitted; empty if that is not known."""
    judged: tuple[MitigationTrial, ArmResult] | None
    """The trial and its arm that judged it."""
    merged: bool
    gguf: bool


def card_text(card: Card, *, name: str) -> str:
    """The card, in Markdown; `name` is the directory's."""
    source, method = card.model.origin.source, str(card.method)
    form = "The whole model with the change in its weights" if card.merged else "A PEFT (LoRA) adapter"
    also = "; `adapter.gguf` is the same change for llama.cpp" if card.gguf else ""
    kind = [] if card.merged else [f"base_model: {source}", "library_name: peft"]
    return "\n".join(
        [
            *["---", *kind, "tags: [position-bias]", "---"],
            f"# {method.partition('(')[0]} against position bias, for {source}",
            "",
            f"{form}, written by posbias {__version__}{also}. Its method is `{method}`.",
            "",
            *_base_lines(card),
            *_fit_lines(card.how),
            "",
            "## Does it help?",
            "",
            *_verdict_lines(card),
            "",
            *_cost_lines(card),
            "## Use",
            "",
            "```bash",
            *(merged_commands(name) if card.merged else adapter_commands(source, name, card.method.rank)),
            *(gguf_commands(source, name) if card.gguf else []),
            "```",
            *_sample_lines(card.how),
            "",
        ]
    )


def adapter_commands(source: str, directory: str, rank: int) -> list[str]:
    """Commands that serve an adapter beside its base model, or the answer to one text; `transformers serve` takes none.

    A base model in a GGUF file is one for llama.cpp alone.
    """
    if source.endswith(GGUF):
        return [f"# vLLM and transformers take no adapter of {source}: export it with --merged"]
    base = ["posbias models get demo --out demo  # the base model, where the adapter looks for it"]
    place = shlex.quote(f"posbias={directory}")
    served = next((size for size in LARGER_RANKS if size >= rank), None)
    larger = f" --max-lora-rank {served}" if rank > LARGEST_RANK else ""
    loaded = f'pipeline("text-generation", {json.dumps(directory)})'
    program = f'from transformers import pipeline; print({loaded}("Hello", max_new_tokens=20))'
    return [
        *(base if source == "demo" else []),
        *([f"vllm serve {shlex.quote(source)} --enable-lora{larger} --lora-modules {place}"] if served else []),
        f"python -c {shlex.quote(program)}  # transformers, with peft installed",
    ]


def merged_commands(directory: str) -> list[str]:
    """Commands that serve a merged checkpoint."""
    return [f"{program} serve {shlex.quote(directory)}" for program in ("vllm", "transformers")]


def gguf_commands(source: str, directory: str) -> list[str]:
    """The command that serves a GGUF adapter beside a GGUF file of the base model."""
    given = source.endswith(GGUF)
    base, note = (shlex.quote(source), "") if given else ("BASE.gguf", f"  # {source}, converted by llama.cpp")
    return [f"llama-server -m {base} --lora {shlex.quote(directory + '/adapter.gguf')}{note}"]


def _base_lines(card: Card) -> list[str]:
    model = card.model
    revision = f", revision {model.origin.revision}" if model.origin.revision else ""
    precision = str(model.dtype).removeprefix("torch.")
    weights = weights_sha256(model.network)[:16]
    return [
        f"- Base model: {model.origin.source}{revision}, weights {weights} ({precision}); made for these alone.",
        f"- Size: updates of rank {card.method.rank}; merged, no time.",
    ]


def _fit_lines(how: Mapping[str, Any]) -> list[str]:
    """Lines about its samples and losses; a record may lack any of them."""
    if not how.get("calibration_samples"):
        return ["- Fitted to: nothing that is on record."]
    tokens = how.get("prompt_tokens")
    lengths = "" if not tokens else f" of {tokens[0]} to {tokens[1]} tokens, beyond which nothing is known,"
    prompts = f"{how.get('calibration_prompts', '?')} prompts{lengths}"
    lines = [
        f"- Fitted to: {how['calibration_samples']} samples in {prompts} in {len(how.get('answer_loss', []))} steps."
    ]
    if losses := how.get("held_out_loss"):
        lines.append(
            f"- Answers that no step saw ({how['held_out_prompts']} prompts): {losses[0]:.3f} nats per token at first, "
            f"{min(losses):.3f} at the best, which was taken."
        )
    if how.get("penalty") and how.get("text_loss"):
        last = float(np.mean(how["text_loss"][-10:]))
        lines.append(f"- Ordinary text while it was fitted: {last:.4f} nats per token away from the base model.")
    return lines


def _verdict_lines(card: Card) -> list[str]:
    if card.judged is None:
        return ["Not judged yet: `posbias mitigate MODEL --task TASK --methods RECIPE.json`, on samples of no fit."]
    trial, arm = card.judged
    judgement, verdict = trial.judgement, _verdict(trial, arm)
    measure, number = judgement.measure, trial.arms.index(arm)
    rows = zip(judgement.positions, trial.curves[measure][0], trial.curves[measure][number], strict=True)
    return [
        f"On {verdict.n_samples} samples of `{trial.task}` that no fit saw: **{words(verdict)}**. "
        + " ".join(reasons(verdict, judgement)),
        "",
        f"| position | {measure_words(measure)}, before | with it |",
        "|---|---|---|",
        *(f"| {position} | {before} | {after} |" for position, before, after in rows),
    ]


def _verdict(trial: MitigationTrial, arm: ArmResult) -> Verdict:
    return next(verdict for verdict in trial.judgement.verdicts if verdict.name == arm.name)


def _cost_lines(card: Card) -> list[str]:
    """What the trial measured beside the answers, and its caveats."""
    if card.judged is None:
        return []
    trial, arm = card.judged
    before, after = map(seconds_each, (trial.arms[0], arm))
    caveats = [*caveats_of(trial.record), *warnings(trial.choice, (trial.arms[0], arm))]
    return [
        "## What does it cost?",
        "",
        f"- Ordinary text, loss per token: {text_change(_verdict(trial, arm), arm)}; accepted: {trial.tolerance:g}.",
        f"- Seconds per request in that trial: {after}, without it {before}.",
        *(f"- Caveat: {caveat}." for caveat in caveats),
        "",
    ]


def _sample_lines(how: Mapping[str, Any]) -> list[str]:
    """Hashes by which samples of the fit are known again."""
    samples = [str(sample) for sample in how.get("samples", []) if re.fullmatch(r"\w+", str(sample))]
    return ["", "## Samples of the fit, by hash", "", " ".join(samples)] if samples else []
