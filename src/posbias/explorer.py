"""Two architectures on sliders, their rollouts in one figure, and a target with its design: `posbias explore`.

What can be chosen comes from the registries, what is drawn from `pb.predict` and `pb.design` (docs/theory, section 1).
"""

import marimo

app = marimo.App(width="full", app_title="posbias explore")

with app.setup:
    from functools import partial
    from typing import Any

    import marimo as mo
    from pydantic import TypeAdapter

    import posbias as pb
    from posbias.architecture import ENCODINGS, MASKS
    from posbias.checks import RESIDUAL_MIXING
    from posbias.designing.result import OVER, TARGETS, resolve_target
    from posbias.results.drawing import image_of
    from posbias.results.figures import profile_figure

    NONE = "none"
    WHOLE = [2**power for power in range(17)]
    NUMBERS = [*(hundredth / 100 for hundredth in range(-99, 101)), 0.995, 0.999, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50]
    slider: Any = partial(mo.ui.slider, show_value=True, debounce=True)


@app.function
def variants(sort: str, registry: Any, chosen: str, *others: str) -> dict[str, Any]:
    """A choice of a mask, an encoding or a target; for each, sliders for its numbers and text fields for its lists."""
    made = {sort: mo.ui.dropdown([*others, *registry], value=chosen, label=sort)}
    for variant in registry:
        own = {}
        for name, schema in TypeAdapter(registry[variant]).json_schema().get("properties", {}).items():
            kind = schema.get("anyOf", [schema])[0]["type"]
            if kind in ("integer", "number"):
                start = schema.get("default", 64 if kind == "integer" else 0.9)
                steps = sorted({*(WHOLE if kind == "integer" else NUMBERS), start})
                own[name] = slider(steps=steps, value=start, label=name)
            else:
                own[name] = mo.ui.text(placeholder="[0.5, 0.1]", label=name)
        made[f"{sort}={variant}"] = mo.ui.dictionary(own)
    return made


@app.function
def spelled(column: dict[str, Any]) -> dict[str, Any]:
    """The choices of a column, its variants as the command line takes them; an empty field is left out."""
    choices = {name: value for name, value in column.items() if "=" not in name}
    for name, value in choices.items():
        values = column.get(f"{name}={value}", {})
        if given := ", ".join(f"{parameter}={number}" for parameter, number in values.items() if number != ""):
            choices[name] = f"{value}({given})"
    return choices


@app.function
def predicted(stacks: dict[str, pb.Architecture], aim: str, over: str, n_positions: int) -> Any:
    """The figure of all stacks and of the target, W1 to it and to flat, and the design over `over` of the first."""
    profiles = {name: pb.predict(stack, n_positions).profile for name, stack in stacks.items()}
    first, others, below = next(iter(stacks.values())), {"flat": pb.Profile.uniform(n_positions)}, []
    if aim != NONE:  # it has what the residual stream of the first leaves on the last token
        left = float((1 - first.layer_mixing).prod())
        others["target"] = pb.Profile(resolve_target(aim).profile(n_positions, left))
        if over != NONE:
            options = pb.DesignOptions(n_positions=n_positions, starts=2)
            design = pb.design(aim, over, architecture=first, options=options)
            profiles[f"designed over {over}"] = design.profiles[n_positions]
            below = [mo.accordion({f"{over}: the values": mo.json(design.parameters)})]
    title = f"Residual rollout of {n_positions:,} positions"
    curves = [profile.curve(name) for name, profile in profiles.items()]
    measured = [others["target"].curve(f"target, {aim}")] if aim != NONE else []
    picture = image_of(profile_figure("explore", title, curves, measured=measured))
    rows = [
        {"": name} | {f"W1 to {of}": f"{pb.compare(profile, other).wasserstein:.4f}" for of, other in others.items()}
        for name, profile in {**profiles, "flat": others["flat"]}.items()
    ]
    return mo.vstack([mo.image(picture, width="42rem"), mo.ui.table(rows, selection=None), *below])


@app.cell
def _():
    columns = {
        name: {
            "depth": slider(1, 96, value=24, label="depth"),
            "heads": slider(1, 64, value=8, label="heads"),
            "mixing": slider(0, 1, 0.01, value=RESIDUAL_MIXING, label="mixing"),
            **variants("mask", MASKS, "causal"),
            **variants("encoding", ENCODINGS, encoding),
        }
        for name, encoding in {"A": NONE, "B": "alibi"}.items()
    }
    columns["both"] = {
        "length": slider(steps=WHOLE[4:], value=512, label="length"),
        **variants("target", TARGETS, NONE, NONE),
        "file": mo.ui.text(placeholder="runs/x or target.csv", label="or a run, or a file"),
        "over": mo.ui.dropdown([NONE, *OVER], value=NONE, label="design A for it over"),
    }
    asked = mo.ui.dictionary({name: mo.ui.dictionary(column) for name, column in columns.items()})
    return (asked,)


@app.cell
def _(asked):
    _columns = []
    for _name, _column in asked.elements.items():
        _chosen = [f"{name}={value}" for name, value in asked.value[_name].items()]
        _parts = {name: part for name, part in _column.elements.items() if "=" not in name or name in _chosen}
        _shown = [part.vstack() if name in _chosen else part for name, part in _parts.items()]
        _columns.append(mo.vstack([mo.md(f"### {_name}"), *_shown]))
    mo.hstack(_columns, widths="equal", align="start")


@app.cell
def _(asked):
    try:
        _a, _b, _both = map(spelled, asked.value.values())
        _stacks = {"A": pb.Architecture(**_a), "B": pb.Architecture(**_b)}
        _page = predicted(_stacks, _both["file"] or _both["target"], _both["over"], _both["length"])
    except (pb.UsageError, pb.RunError) as _refused:
        _page = mo.callout(str(_refused), kind="danger")
    _page  # noqa: B018
