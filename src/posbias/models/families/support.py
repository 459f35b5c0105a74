"""Verbs that run on every family, from its description: `posbias list families`; exceptions in docs/families.md.

A family that is not described runs through the interface that all causal language models of transformers have.
"""

from collections.abc import Mapping

from posbias.models.families.base import FAMILIES, Family

COLUMNS = ("measure", "attention", "rollout", "power_rollout", "mean_field", "mitigate", "adapter", "evaluate")
YES, NO = "yes", "no"
IN_ATTENTION_LAYERS = "attention layers"
REQUESTS = "requests"
"""Methods that change requests alone, beside adapters."""
NOT_PACKED = "not q, k, v"
UNDESCRIBED: Mapping[str, str] = {
    "gemma3n_text": "layers read tokens beside the stream and share keys",
}
"""Families of transformers that people run and that have no description, and why."""


def support_of(name: str) -> dict[str, str]:
    """Verbs that run on a family, by column, with a note on what does not."""
    if name in UNDESCRIBED:
        reads_tokens = "tokens" in UNDESCRIBED[name]
        answers = dict.fromkeys(COLUMNS, NO) | {"measure": NO if reads_tokens else "no mixing"}
        return answers | {"mitigate": REQUESTS, "adapter": NO, "evaluate": YES, "note": UNDESCRIBED[name]}
    family = FAMILIES[name]
    linear, notes = family.linear is not None, []
    whole = YES if family.attends else NO
    if linear:
        notes.append("linear layers" if family.attends else "linear layers alone")
    if family.no_mean_field is not None:
        notes.append(f"mean field: {family.no_mean_field}")
    if family.some_models is not None:
        notes.append(family.some_models)
    answers = {
        "measure": YES,
        "attention": IN_ATTENTION_LAYERS if linear and family.attends else whole,
        "rollout": YES,
        "power_rollout": YES,
        "mean_field": YES if family.no_mean_field is None else NO,
        "mitigate": _mitigated(family),
        "adapter": NOT_PACKED if family.packs_projections else whole,
        "evaluate": YES,
    }
    return answers | {"note": "; ".join(notes)}


def support_table() -> dict[str, dict[str, str]]:
    """`support_of` of every family, by name."""
    return {name: support_of(name) for name in sorted({*FAMILIES, *UNDESCRIBED})}


def exceptions() -> list[tuple[str, str, str]]:
    """Every answer other than yes: what runs, the answer, and the described families it holds for."""
    table = {name: support_of(name) for name in sorted(FAMILIES)}
    answers = dict.fromkeys((column, row[column]) for column in COLUMNS for row in table.values() if row[column] != YES)
    columns: dict[tuple[str, str], list[str]] = {}
    for column, answer in answers:
        names = ", ".join(name for name, row in table.items() if row[column] == answer)
        columns.setdefault((answer, names), []).append(column)
    return [(", ".join(alike), answer, names) for (answer, names), alike in columns.items()]


def _mitigated(family: type[Family]) -> str:
    if not family.replaceable or not family.attends:
        return REQUESTS
    return YES if family.linear is None else IN_ATTENTION_LAYERS
