"""What the rollouts of arXiv 2602.16837 amount to, as sentences made from the rows, every one with its number."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def rollout_statements(rows: Sequence[Row]) -> list[str]:
    """Reproduction of the table, the role of scale and slopes, contradictions, and what could not be compared."""
    measured = {(row["slopes"], row["variant"]): row for row in rows if "metrics" in row}
    return [
        _reproduced(measured),
        _as_computed(measured),
        _flat(measured),
        *_contradictions(rows),
        "Only BLOOM-176B's measured curve is published as numbers. For the other models profiles are computed and "
        "bounded: W1 is never below the difference of mean positions, and the measured mean is the table's attention-"
        "only W1, because that profile sits on the first token.",
    ]


def _reproduced(measured: Mapping[tuple[str, str], Row]) -> str:
    names = ("attention_only", "residual", "content_published")
    ours = [measured["published", name] for name in names]
    pairs = ", ".join(f"{_w1(row):.4f} ({row['published']:.2f})" for row in ours)
    worst = max(abs(_w1(row) - row["published"]) for row in ours)
    verdict = "the table is reproduced" if worst <= 0.01 else "the table is not reproduced"
    return (
        f"BLOOM-176B with the authors' settings, W1 of a, b, c (published in parentheses): {pairs}; {verdict} "
        f"to {worst:.3f}."
    )


def _as_computed(measured: Mapping[tuple[str, str], Row]) -> str:
    published = _w1(measured["published", "content_published"])
    scaled = _w1(measured["published", "content_scaled"])
    plain, real = _w1(measured["real", "residual"]), _w1(measured["real", "content_scaled"])
    gain = "improves on" if real < plain else "is no better than"
    ratio = scaled / published
    return (
        f"Variant c's {published:.4f} rests on q.k without the division by sqrt(head_dim) that the model performs: "
        f"with it W1 is {scaled:.4f}, {ratio:.1f} times as much, against {_w1(measured['published', 'residual']):.4f} "
        f"without content. With the slopes BLOOM really has (not 2^(-8h/H) for 112 heads) the residual rollout alone "
        f"reaches {plain:.4f}, and content as the model adds it {gain} that ({real:.4f}); unscaled content gives "
        f"{_w1(measured['real', 'content_published']):.4f}."
    )


def _flat(measured: Mapping[tuple[str, str], Row]) -> str:
    flat = measured["published", "residual"]["flat"]["wasserstein"]
    farther = [f"{slopes} slopes, {variant}" for (slopes, variant), row in measured.items() if _w1(row) > flat]
    return (
        f"The flat line is {flat:.4f} from the same curve; farther than it: "
        f"{'; '.join(name.replace('_', ' ') for name in farther) or 'none'}."
    )


def _contradictions(rows: Sequence[Row]) -> list[str]:
    shipped = [row for row in rows if row["slopes"] == "published" and row["variant"] != "content_scaled"]
    against = [row for row in shipped if row["contradicts_table"]]
    said = "; ".join(
        f"{row['model']}, variant {_letter(row)}: mean position {row['mean_position']:.3f} against a measured "
        f"{(row['measured_mean_low'] + row['measured_mean_high']) / 2:.2f} forces W1 >= {row['bound']:.3f}, the table "
        f"says {row['published']:.2f}"
        for row in against
    )
    real = [
        row
        for row in rows
        if row["slopes"] == "real" and row["variant"] in ("residual", "content_scaled") and row["contradicts_table"]
    ]
    other = ", ".join(
        f"{row['model']} {row['variant'].replace('_', ' ')} (at least {row['bound']:.2f}, table {row['published']:.2f})"
        for row in real
    )
    statements = []
    if against:
        statements.append(f"The shipped mixing, content and slopes contradict the table here: {said}.")
    if real:
        statements.append(
            f"With the slopes and content that the models really have, the table's distance is out of reach: {other}."
        )
    return statements


def _letter(row: Row) -> str:
    return {"attention_only": "a", "residual": "b"}.get(row["variant"], "c")


def _w1(row: Row) -> float:
    return float(row["metrics"]["wasserstein"])
