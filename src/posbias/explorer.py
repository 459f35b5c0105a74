"""Two architectures on sliders, their rollouts in one figure, and a target with its design: `posbias explore`.

What can be chosen comes from the registries, what is drawn from `pb.predict` and `pb.design` (docs/theory, section 1).
"""

import marimo

app = marimo.App(width="full", app_title="posbias explore")

with app.setup:
    from collections.abc import Mapping
    from dataclasses import MISSING, fields
    from types import UnionType
    from typing import Any, Union, get_args, get_origin

    import marimo as mo

    import posbias as pb
    from posbias.architecture import ENCODINGS, MASKS
    from posbias.checks import RESIDUAL_MIXING
    from posbias.designing.result import OVER, TARGETS, resolve_target
    from posbias.results.drawing import fragment_of
    from posbias.results.figures import profile_figure

    NONE = "none"
    STACK: dict[str, Any] = {"mask": MASKS, "encoding": ENCODINGS}
    WHOLE = [2**power for power in range(17)]
    SHARES = [hundredth / 100 for hundredth in range(101)]
    STYLE = """<style>
    .chart { --line: #8884; margin: 0; max-width: 70rem } .chart svg { font-size: 10px; fill: currentColor }
    .chart .grid, .chart .told { fill: none; pointer-events: all } .chart .grid { stroke: var(--line) }
    </style>"""
    """What the figure's classes mean on pages of posbias, for a page of marimo."""
    NUMBERS = [*(-share for share in SHARES[1:-1]), *SHARES, 0.995, 0.999, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50]


@app.function
def slider(label: str, steps: list[Any], value: Any) -> Any:
    """A slider over some steps that waits until it is let go."""
    return mo.ui.slider(steps=steps, value=value, show_value=True, debounce=True, label=label)


@app.function
def parameters(variant: Any) -> Any:
    """Sliders for the numbers of a mask, an encoding or a target, from their defaults on; text fields for others."""
    made = {}
    for entry in fields(variant):
        kinds = get_args(entry.type) if get_origin(entry.type) in (Union, UnionType) else (entry.type,)
        kinds = tuple(getattr(kind, "__origin__", kind) for kind in kinds)  # without the bounds of `Annotated`
        start = entry.default
        if start is MISSING:
            start = 64 if int in kinds else 0.9 if float in kinds else ""
        if isinstance(start, int | float):
            made[entry.name] = slider(entry.name, sorted({*(WHOLE if int in kinds else NUMBERS), start}), start)
        else:
            text = "" if entry.default is MISSING else repr(start)
            made[entry.name] = mo.ui.text(text, placeholder="[0.5, 0.1]", label=entry.name)
    return mo.ui.dictionary(made)


@app.function
def spelled(name: str, values: Mapping[str, Any]) -> str:
    """A variant as the command line takes it; an empty field is left out."""
    given = [f"{parameter}={value}" for parameter, value in values.items() if value != ""]
    return f"{name}({', '.join(given)})" if given else name


@app.function
def predicted(stacks: Mapping[str, pb.Architecture], aim: str | None, over: str, n_positions: int) -> Any:
    """The figure of all stacks and of the target, W1 to it and to flat, and the design over `over` of the first."""
    profiles = {name: pb.predict(stack, n_positions).profile for name, stack in stacks.items()}
    targets, found = {}, []
    if aim is not None:  # it has what the residual stream leaves on the last token
        shape = resolve_target(aim)
        left = {name: float((1 - stack.layer_mixing).prod()) for name, stack in stacks.items()}
        targets = {name: pb.Profile(shape.profile(n_positions, share)) for name, share in left.items()}
        if over != NONE:
            first, name = next(iter(stacks)), f"designed over {over}"
            options = pb.DesignOptions(n_positions=n_positions, starts=2)
            design = pb.design(aim, over, architecture=stacks[first], options=options)
            profiles[name], targets[name] = design.profiles[n_positions], targets[first]
            found = [mo.accordion({f"{name}: the values": mo.json(design.parameters)})]
    drawn = profile_figure(
        "explore",
        f"Residual rollout of {n_positions:,} positions",
        [profile.curve(name) for name, profile in profiles.items()],
        measured=[next(iter(targets.values())).curve(f"target, {aim}")] if targets else [],
    )
    flat, rows = pb.Profile.uniform(n_positions), []
    for name, profile in profiles.items():
        row = {"": name, "first token": f"{profile.influence[0]:.4g}", "last token": f"{profile.influence[-1]:.4g}"}
        row["W1 to flat"] = f"{pb.compare(profile, flat).wasserstein:.4f}"
        if name in targets:
            row["W1 to target"] = f"{pb.compare(profile, targets[name]).wasserstein:.4f}"
            row["flat to target"] = f"{pb.compare(flat, targets[name]).wasserstein:.4f}"
        rows.append(row)
    table = mo.ui.table(rows, selection=None, show_download=False, show_search=False)
    return mo.vstack([mo.Html(STYLE + fragment_of(drawn, anchor="explore")), table, *found])


@app.cell
def _():
    stacks = mo.ui.dictionary(
        {
            name: mo.ui.dictionary(
                {
                    "depth": slider("depth", [*range(1, 97)], 24),
                    "heads": slider("heads", [*range(1, 65)], 8),
                    "mixing": slider("mixing", SHARES, RESIDUAL_MIXING),
                    "mask": mo.ui.dropdown([*MASKS], value="causal", label="mask"),
                    "encoding": mo.ui.dropdown([*ENCODINGS], value=encoding, label="encoding"),
                }
            )
            for name, encoding in {"A": NONE, "B": "alibi"}.items()
        }
    )
    asked = mo.ui.dictionary(
        {
            "length": slider("length", WHOLE[4:], 512),
            "target": mo.ui.dropdown([NONE, *TARGETS], value=NONE, label="target"),
            "file": mo.ui.text(placeholder="runs/x or target.csv", label="or a run, or a file"),
            "over": mo.ui.dropdown([NONE, *OVER], value=NONE, label="design A for it over"),
        }
    )
    return asked, stacks


@app.cell
def _(asked, stacks):
    settings = {
        f"{sort} of {name}": parameters(registry[stack[sort]])
        for name, stack in stacks.value.items()
        for sort, registry in STACK.items()
    }
    aimed = asked.value["target"]
    settings = mo.ui.dictionary(settings | ({} if aimed == NONE else {"target": parameters(TARGETS[aimed])}))
    return (settings,)


@app.cell
def _(asked, settings, stacks):
    _below = settings.elements
    _columns = []
    for _name, _stack in stacks.elements.items():
        _parts = [mo.vstack([_stack[sort], *_below[f"{sort} of {_name}"].elements.values()]) for sort in STACK]
        _numbers = [_stack[number] for number in ("depth", "heads", "mixing")]
        _columns.append(mo.vstack([mo.md(f"### {_name}"), *_numbers, *_parts]))
    _target = [asked["target"], *(_below["target"].elements.values() if "target" in _below else ())]
    _columns.append(mo.vstack([mo.md("### Both"), asked["length"], *_target, asked["file"], asked["over"]]))
    mo.hstack(_columns, widths="equal", align="start")


@app.cell
def _(asked, settings, stacks):
    _values, _chosen = settings.value, asked.value
    try:
        _built = {
            _name: pb.Architecture(
                **_stack | {_sort: spelled(_stack[_sort], _values[f"{_sort} of {_name}"]) for _sort in STACK}
            )
            for _name, _stack in stacks.value.items()
        }
        _shape = None if _chosen["target"] == NONE else spelled(_chosen["target"], _values["target"])
        _page = predicted(_built, _chosen["file"] or _shape, _chosen["over"], _chosen["length"])
    except (pb.UsageError, pb.RunError) as _refused:
        _page = mo.callout(str(_refused), kind="danger")
    _page  # noqa: B018


if __name__ == "__main__":
    app.run()
