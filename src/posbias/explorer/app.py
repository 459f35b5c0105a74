"""Two architectures on sliders, their rollouts in one figure, and a target with its design: `posbias explore`.

What can be chosen comes from the registries, what is drawn from `pb.predict` and `pb.design` (docs/theory, section 1).
"""

import marimo

app = marimo.App(width="full", app_title="posbias explore")

with app.setup:
    from collections.abc import Mapping, Sequence
    from dataclasses import MISSING, fields
    from types import UnionType
    from typing import Any, Union, get_args, get_origin

    import marimo as mo

    import posbias as pb
    from posbias.architecture import ENCODINGS, MASKS
    from posbias.checks import RESIDUAL_MIXING
    from posbias.designing.result import KEY_BIAS, TARGETS, resolve_target
    from posbias.designing.solving import FREE
    from posbias.registry import Registry
    from posbias.results.drawing import fragment_of
    from posbias.results.figures import RUNS, profiles_figure

    NONE = "none"
    STACK = {"mask": (MASKS, "causal", 1.0), "encoding": (ENCODINGS, NONE, 0.9)}
    TARGET = {"target": (TARGETS, NONE, 0.9)}
    WHOLE = [2**power for power in range(17)]
    NUMBERS = [*(hundredth / 100 for hundredth in range(101)), 0.995, 0.999, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50]
    MIXING = [number for number in NUMBERS if number <= 1]
    SIGNED = [*(-number for number in NUMBERS if number not in {0, 1}), *NUMBERS]  # targets take exponents from -1 on


@app.function
def controls(
    sorts: Mapping[str, tuple[Registry[Any], str, float]], numbers: Sequence[float], extra: Sequence[str] = ()
) -> dict[str, Any]:
    """A list of each sort's variants, and the parameters of every variant, which keep their values while it is away.

    Args:
        sorts: By name a registry, the variant that is chosen at first, and where numbers without default begin.
        numbers: Steps of the sliders of numbers that are not counts.
        extra: What can be chosen beside the variants.
    """
    made: dict[str, Any] = {}
    for sort, (registry, first, start) in sorts.items():
        made[sort] = mo.ui.dropdown([*extra, *registry], value=first, label=sort)
        made |= {
            f"{sort} {name}": mo.ui.dictionary(
                {each.name: parameter(each, start, numbers) for each in fields(registry[name])}
            )
            for name in registry
        }
    return made


@app.function
def parameter(field: Any, number: float, numbers: Sequence[float]) -> Any:
    """A slider for a parameter that is a number, a text field for any other, from its default on."""
    needed = field.default is MISSING
    sorts = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
    sorts = tuple(getattr(sort, "__origin__", sort) for sort in sorts)  # without the bounds of `Annotated`
    start = field.default if not needed else 64 if int in sorts else number if float in sorts else ""
    if isinstance(start, int | float):
        steps = sorted({*(WHOLE if int in sorts else numbers), start})
        return mo.ui.slider(steps=steps, value=start, show_value=True, debounce=True, label=field.name)
    return mo.ui.text("" if needed else repr(start), placeholder="[0.5, 0.1]", label=field.name)


@app.function
def shown(chosen: Any, sort: str) -> Any:
    """The list of a sort, and below it the parameters of the chosen variant."""
    parameters = chosen.elements.get(f"{sort} {chosen.value[sort]}")
    return mo.vstack([chosen[sort], *(() if parameters is None else parameters.elements.values())])


@app.function
def spelled(values: Mapping[str, Any], sort: str) -> str:
    """The chosen variant as the command line takes it; an empty field is left out."""
    given = [f"{name}={value}" for name, value in values[f"{sort} {values[sort]}"].items() if value != ""]
    return f"{values[sort]}({', '.join(given)})" if given else str(values[sort])


@app.function
def predicted(stacks: Mapping[str, Mapping[str, Any]], aim: str | None, over: str, n_positions: int) -> Any:
    """The figure of all stacks and of the target, W1 to it and to flat, and the design over `over` of the first."""
    built = {
        name: pb.Architecture(
            values["depth"],
            values["heads"],
            mixing=values["mixing"],
            **{sort: spelled(values, sort) for sort in STACK},
        )
        for name, values in stacks.items()
    }
    profiles = {name: pb.predict(stack, n_positions).profile for name, stack in built.items()}
    targets, found = {}, []
    if aim is not None:
        left = {name: float((1 - stack.layer_mixing).prod()) for name, stack in built.items()}
        targets = {name: pb.Profile(resolve_target(aim).profile(n_positions, share)) for name, share in left.items()}
        if over != NONE:
            first = next(iter(built.values()))
            design = pb.design(
                aim, over, architecture=first, options=pb.DesignOptions(n_positions=n_positions, starts=2)
            )
            name = f"designed over {over}"
            profiles[name], targets[name] = design.profiles[n_positions], next(iter(targets.values()))
            found = [mo.accordion({f"{name}: the values": mo.json(design.parameters)})]
    strokes = {name: (profile, stroke) for (name, profile), stroke in zip(profiles.items(), RUNS, strict=False)}
    drawn = profiles_figure(
        "explore",
        f"Residual rollout of {n_positions:,} positions",
        strokes,
        measured={f"target, {aim}": next(iter(targets.values()))} if targets else None,
    )
    return mo.vstack([mo.Html(fragment_of(drawn, anchor="explore")), table(profiles, targets), *found])


@app.function
def table(profiles: Mapping[str, pb.Profile], targets: Mapping[str, pb.Profile]) -> Any:
    """W1 of every profile to the flat line and to its target, which has what the residual stream leaves at the end."""
    rows = []
    for name, profile in profiles.items():
        flat = pb.Profile.uniform(profile.n_positions)
        row = {"": name, "first token": f"{profile.influence[0]:.4g}", "last token": f"{profile.influence[-1]:.4g}"}
        row["W1 to flat"] = f"{pb.compare(profile, flat).wasserstein:.4f}"
        if name in targets:
            row["W1 to target"] = f"{pb.compare(profile, targets[name]).wasserstein:.4f}"
            row["flat to target"] = f"{pb.compare(flat, targets[name]).wasserstein:.4f}"
        rows.append(row)
    return mo.ui.table(rows, selection=None, show_download=False, show_search=False)


@app.cell
def _():
    counted = {"depth": (96, 24), "heads": (64, 8)}
    stacks = mo.ui.dictionary(
        {
            name: mo.ui.dictionary(
                {
                    **{
                        count: mo.ui.slider(1, most, value=value, show_value=True, debounce=True, label=count)
                        for count, (most, value) in counted.items()
                    },
                    "mixing": mo.ui.slider(
                        steps=MIXING, value=RESIDUAL_MIXING, show_value=True, debounce=True, label="mixing"
                    ),
                    **controls({**STACK, "encoding": (ENCODINGS, encoding, 0.9)}, NUMBERS),
                }
            )
            for name, encoding in {"A": NONE, "B": "alibi"}.items()
        }
    )
    asked = mo.ui.dictionary(
        {
            "length": mo.ui.slider(
                steps=[2**power for power in range(4, 17)], value=512, show_value=True, debounce=True, label="length"
            ),
            **controls(TARGET, SIGNED, [NONE]),
            "file": mo.ui.text(placeholder="runs/x or target.csv", label="or a run, or a file"),
            "over": mo.ui.dropdown([NONE, KEY_BIAS, *FREE], value=NONE, label="design A for it over"),
        }
    )
    return asked, stacks


@app.cell
def _(asked, stacks):
    columns = [
        mo.vstack(
            [
                mo.md(f"### {name}"),
                *(stack[number] for number in ("depth", "heads", "mixing")),
                *(shown(stack, sort) for sort in STACK),
            ]
        )
        for name, stack in stacks.elements.items()
    ]
    columns.append(
        mo.vstack([mo.md("### Both"), asked["length"], shown(asked, "target"), asked["file"], asked["over"]])
    )
    mo.hstack(columns, widths="equal", align="start")


@app.cell
def _(asked, stacks):
    _chosen = asked.value
    _aim = _chosen["file"] or (None if _chosen["target"] == NONE else spelled(_chosen, "target"))
    try:
        _shown = predicted(stacks.value, _aim, _chosen["over"], _chosen["length"])
    except (pb.UsageError, pb.RunError) as _refused:
        _shown = mo.callout(str(_refused), kind="danger")
    _shown  # noqa: B018


if __name__ == "__main__":
    app.run()
