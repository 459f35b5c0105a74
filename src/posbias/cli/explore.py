"""`posbias explore`: the residual rollout of any architecture, live, as a page that opens in the browser."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_document
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.architecture.published_models import PublishedModel

EXAMPLE = (
    "Example: `posbias explore` · as a file, with what a finished run measured beside the theory: "
    "`posbias explore runs/measured --out explorer.html`"
)


def explore(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs whose measured profiles are shown as well.", show_default=False)
    ] = None,
    seed: options.UnusedSeed = 0,
    out: Annotated[Path | None, options.out_option("The page's file, ending in .html; it is not opened.")] = None,
    json: options.Json = False,
) -> None:
    """Explore architectures in the browser.

    Sliders set what mixes positions; a target drawn with the mouse becomes a key bias.
    """
    import tempfile
    import webbrowser

    from posbias.files import write_atomically
    from posbias.report.explore import explorer_page
    from posbias.runs.records import read_record

    if out is not None and out.suffix != ".html":
        raise UsageError(f"--out {str(out)!r}: allowed is the name of a file that ends in .html")
    records = [read_record(run.parent if run.name == "record.json" else run) for run in runs or ()]
    page = explorer_page(presets(), records)
    path = Path(tempfile.mkdtemp(prefix="posbias-")) / "explorer.html" if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    if out is None:
        webbrowser.open(path.as_uri())
    print_document({"page": str(path), "runs": [str(run) for run in runs or ()]}, as_json=json, line=f"page: {path}")


def presets() -> dict[str, dict[str, Any]]:
    """Stacks that the page can start from: textbook ones, and the models whose mixing arXiv 2602.16837 published."""
    from posbias.architecture.published_models import bloom_influence, published_models
    from posbias.report.explore import curve_of

    stacks: dict[str, dict[str, Any]] = {
        "no residual stream, 24 layers": {
            "settings": {"mixing": 1.0},
            "note": "Attention alone, causal, without encoding: nearly all influence falls on the first token "
            "(Wu et al. 2025; arXiv 2603.10123).",
        },
        "a residual stream, 24 layers": {
            "settings": {},
            "note": "Attention carries a tenth of each layer's update, about what five published models have.",
        },
        "windows, every sixth layer whole": {
            "settings": {"depth": 18, "n": 8192, "mask": "window", "width": 512, "full": 6},
            "note": "Layers and masks of Gemma 3 270M; the mixing of 0.1 is not measured.",
        },
        "flat at every length": {
            "settings": {"encoding": "gamma"},
            "note": "Gamma keys whose exponents grow by 1 / (1 - m) from layer to layer: every position weighs the "
            "same, whatever N is; what the residual stream keeps stays on the last one.",
        },
    }
    stacks |= {model.name: _published(model) for model in published_models()}
    stacks["bloom-176b"]["measured"] = curve_of("BLOOM-176B, measured gradient of the probability", bloom_influence())
    return stacks


def _published(model: "PublishedModel") -> dict[str, Any]:
    """Settings of a published model: the slopes it really uses, its measured mixing, no content."""
    factor = model.head_dim**-0.5 if model.scales_bias else 1.0
    settings = {"n": model.n_positions, "heads": model.heads, "encoding": "alibi", "factor": factor}
    scaled = ", slopes divided by the root of the head's width as in its logits" if model.scales_bias else ""
    return {
        "settings": settings,
        "mixing": model.mixing.tolist(),
        "note": f"ALiBi{scaled}; mixing of each layer as measured in arXiv 2602.16837 on 256 tokens. Without content.",
    }
