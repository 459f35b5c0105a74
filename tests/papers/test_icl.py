"""In-context retrieval: statements follow planted gaps, shipped studies hold the source's settings, and smoke runs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias.architecture import Causal, SlidingWindow
from posbias_papers import PAPERS
from posbias_papers.findings import Outcome, Outcomes
from posbias_papers.reproduction import SIZES, StudySettings
from posbias_papers.wu2025.icl import PLAIN, Cells, icl_findings, icl_reproduction, reached, sink_scores

PAPER = "icl-2502.01951"
STUDIES = ("depth", "ends", "places", "residual", "sinks")
ENDS_U = (0.3, 0.05, -0.25)
PEAK = {"first": (0.4, 0.5, 0.02), "middle": (-0.3, 0.0, 0.3), "last": (-0.02, -0.5, -0.4)}


def outcome(seed, gaps, sinks=None, **factors):
    draw = np.random.default_rng([seed, abs(hash(str(sorted(factors.items(), key=str)))) % 2**32])
    places = np.linspace(0.4, 0.6, 8) + draw.normal(0, 0.01, 8)
    noisy = np.array(gaps) + draw.normal(0, 0.005, 3)
    arrays = {
        "gaps": noisy,
        "accuracy": places,
        "novel": np.array(0.55),
        "sinks": np.zeros(17) if sinks is None else np.array(sinks) + draw.normal(0, 0.001, 17),
    }
    return Outcome({**PLAIN, **factors}, seed, "done", arrays)


def as_published(items="mixture", seeds=6):
    """Outcomes that have every sign the source reports."""
    base = {"items": items}
    primacy = {"none": 0.3, "rope": 0.2, "decay": 0.05}
    bump = {2: 0.0, 4: 0.2, 6: 0.05} if items == "mixture" else {2: 0.0, 4: 0.1, 6: 0.2}
    members = []
    for seed in range(seeds):
        for encoding, depth in itertools.product(primacy, (2, 4, 6)):
            gap = primacy[encoding] + 0.05 * depth
            sink = [0.8] + [0.1] * 16
            members.append(outcome(seed, (gap, gap, 0.02), sink, encoding=encoding, depth=depth, **base))
            gaps = ENDS_U if (encoding, depth) == ("rope", 6) else (bump[depth],) * 3
            gaps = (gaps[0], 0.1 + bump[depth], gaps[2])
            members.append(outcome(seed, gaps, encoding=encoding, depth=depth, residual=True, **base))
        for mask, encoding in itertools.product(("full", "causal"), ("none", "sinusoidal", "rope")):
            gaps = ENDS_U if encoding != "none" else (0.0, 0.0, 0.0) if mask == "full" else (0.4, 0.45, 0.05)
            cell = {"mask": mask, "encoding": encoding, "residual": True, **base}
            members.append(outcome(seed, gaps, answers="first_and_last", **cell))
            if mask == "causal":
                for answers, peak in PEAK.items():
                    chosen = (0.2, 0.3, 0.1) if encoding == "none" else peak
                    members.append(outcome(seed, chosen, answers=answers, **cell))
        for width in (5, 9, 13):
            sink = [width / 20] + [0.1] * 16
            members.append(outcome(seed, (0, 0, 0), sink, mask=f"sliding_window(width={width})", **base))
        for length in (2, 4, 6):
            sink = [0.6] * length + [0.1] * (17 - length)
            members.append(outcome(seed, (0, 0, 0), sink, mask=f"prefix(length={length})", **base))
    return members


@pytest.mark.parametrize("items", ["mixture", "fixed"])
def test_what_the_source_reports_bears_out_every_statement(items):
    cells = Cells(Outcomes(as_published(items)), {"items": items})
    findings = icl_findings(cells, items)
    wrong = {finding.reported: finding.verdict for finding in findings if finding.verdict != "reproduced"}
    assert not wrong
    assert len(findings) == (16 if items == "mixture" else 15)


def test_the_opposite_signs_contradict_them():
    turned = [
        Outcome(each.factors, each.seed, each.status, {**each.arrays, "gaps": -each.arrays["gaps"]})
        for each in as_published()
    ]
    findings = icl_findings(Cells(Outcomes(turned), {}), "mixture")
    by_text = {finding.reported[:60]: finding.verdict for finding in findings}
    assert by_text["without residual connections more layers mean more bias to t"] == "not reproduced"
    assert by_text["decay and RoPE reduce the bias to the first place that the c"] == "not reproduced"
    assert by_text["sin and RoPE capture both ends under either mask: lost in th"] == "not reproduced"


def test_what_was_not_trained_is_not_run():
    assert {finding.verdict for finding in icl_findings(Cells(Outcomes([]), {}), "mixture")} == {"not run"}


def test_the_whole_reproduction_says_how_far_training_came():
    outcomes = Outcomes([*as_published(), Outcome({**PLAIN, "depth": 8}, 0, "diverged", {})])
    made = icl_reproduction(outcomes, steps=1000, batch=64, settings=StudySettings())
    assert "0.5 % of its sequences" in made.statements[0]
    assert "naming any label of the context 0.50" in made.statements[0]
    assert made.statements[1].startswith("Of 31 published findings: 16 reproduced, 15 not run")
    assert "1 of" in made.statements[-1]
    assert "diverged" in made.statements[-1]
    slugs = {figure.slug for figure in made.figures}
    assert {"icl-mixture-plain-1", "icl-mixture-residual-0"} <= slugs
    assert reached({"steps": 100_000, "batch": 128, "accuracy": None}).endswith("1e+02 % of its sequences.")


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_the_sources_networks(size):
    studies = PAPERS[PAPER]().studies(StudySettings(size))
    assert set(studies) == {*STUDIES, *(f"fixed-{name}" for name in STUDIES)}
    for name, study in studies.items():
        for member in replace(study, seeds=(0,)).members():
            assert (member.config.width, member.config.architecture.heads, member.task.pairs) == (64, 1, 8)
            assert (member.config.readout, member.config.readout_layers, member.config.n_outputs) == ("mlp", 3, 32)
            assert str(member.optimiser) == "adamw(weight_decay=1e-06)"
            assert member.task.items == ("fixed" if name.startswith("fixed") else "mixture")
    if size == "full":
        assert {(s.schedule.steps, s.schedule.batch) for s in studies.values()} == {(100_000, 128)}
    assert size == "smoke" or all(len(study.seeds) >= 6 for study in studies.values())


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3)])
def test_sink_scores_are_the_published_sum_and_none_where_attention_is_not_finite(mask):
    visible = mask.visible(6)
    logits = torch.randn(2, 3, 4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    maps = logits.masked_fill(~torch.from_numpy(visible), -torch.inf).softmax(-1)
    maps[0, 2, 0, 0, 0, 0] = torch.nan
    expected = np.full((3, 6), np.nan)
    for member, key in np.ndindex(2, 6):
        above = (maps[:, member, :, 0, :, key] > 0.2).double().mean((0, 1)).sum().item()
        expected[member, key] = above / visible[:, key].sum()
    np.testing.assert_allclose(sink_scores(maps, visible), expected, atol=1e-12)
