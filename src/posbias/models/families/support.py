"""What runs on which family, from the table of layouts and from transformers' own sources: `posbias list families`."""

from importlib.util import find_spec
from pathlib import Path

from posbias.models.families.table import DENSE, FAMILIES

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What a module of transformers imports if its attention can be replaced."""


def replaceable(name: str) -> bool:
    """Tell whether a family's attention goes through transformers' attention interface, without a cap on its logits."""
    folder = name.removesuffix("_text")
    spec = find_spec(f"transformers.models.{folder}.modeling_{folder}")
    wired = spec is not None and spec.origin is not None and INTERFACE in Path(spec.origin).read_text(encoding="utf-8")
    return wired and FAMILIES[name].softcap is None


def runs_on(name: str) -> str:
    """What runs on one family of the table, in a line."""
    row, parts = FAMILIES[name], ["every verb" if name in DENSE else "every verb but the power rollout and mean field"]
    if row.linear is not None:
        parts.append("no rollout, and attention of the layers that have it")
    if row.gated_queries:
        parts.append("adapters not of q, k, v")
    if not replaceable(name):
        parts.append("its attention is not replaced, so that of methods adapters and changed prompts alone run")
    return "; ".join(parts)


def families() -> dict[str, str]:
    """`runs_on` of every family by name."""
    return {name: runs_on(name) for name in FAMILIES}
