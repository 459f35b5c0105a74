"""Position copy: statements follow planted losses, the shipped studies parse, and the smoke size runs to its page."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias.errors import UsageError
from posbias.models import load_model
from posbias.records import load_record
from posbias.report.reproductions import reproduction_record, stored_figures, write_reproduction_report
from posbias.reproduce import reproduce
from posbias.reproduce.position_copy_published import CONFIGURATIONS, PUBLISHED, blind_loss
from posbias.reproduce.position_copy_statements import position_copy_findings
from posbias.reproduce.position_copy_views import losses_table, position_copy_figures
from posbias.reproduce.study_runs import SIZES, StudySettings, shipped_studies
from posbias.tasks.synthetic.copying_baselines import partial_information_losses
from posbias.training import TrainingRun

PAPER = "position-copy-liu2026"


def planted(noise=0.01, seeds=6):
    """The published losses with a little noise, for every network whose values were read."""
    draw = np.random.default_rng(0)
    return {
        configuration: np.maximum(np.array(values) + draw.normal(0, noise, (seeds, 10)), 0)
        for configuration, values in PUBLISHED.items()
    }


def verdicts(losses):
    findings = position_copy_findings(losses, np.random.default_rng(0))
    return {f"{finding.where}: {finding.reported[:20]}": finding.verdict for finding in findings}


def test_the_published_losses_bear_out_the_published_statements():
    found = verdicts(planted())
    assert set(found.values()) == {"reproduced"}, found
    assert len(found) == 13


def test_blind_networks_bear_out_none():
    draw = np.random.default_rng(1)
    blind = {
        configuration: blind_loss() + draw.normal(0, 0.001, (6, 10))
        for configuration in CONFIGURATIONS
        if configuration in PUBLISHED
    }
    found = verdicts(blind)
    assert found["Figure 1, right: two layers differ in"] in ("undecided", "not reproduced")
    assert found["Figure 3: residual connections"] in ("undecided", "not reproduced")
    assert all(verdict != "reproduced" for where, verdict in found.items() if where.startswith("Numbers"))


def test_what_was_not_trained_is_not_run_and_few_seeds_decide_nothing():
    assert set(verdicts({}).values()) == {"not run"}
    assert set(verdicts(planted(seeds=3)).values()) == {"undecided"}


def test_figures_and_table_show_seeds_published_values_and_baselines():
    losses = planted()
    figures = position_copy_figures(losses, losses)
    names = [curve.name for curve in figures[0].curves]
    assert names[:2] == ["1 layer, d 2", "1 layer, d 2, published"]
    levels = partial_information_losses(10, 10)
    assert figures[0].curves[-1].y[0] == pytest.approx(levels["counts_and_own"])
    assert [curve.y[0] for curve in figures[0].curves if curve.name.startswith("ln V")] == [blind_loss()]
    assert len(losses_table(losses).cells) == 4 * len(losses)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_trains_every_target_of_every_network(size):
    (study,) = shipped_studies(PAPER, StudySettings(size)).values()
    members = replace(study, seeds=(0,)).members()
    seen = {
        (m.config.architecture.depth, m.config.width, m.config.residual, m.config.mlp, m.task.target) for m in members
    }
    assert len(seen) == len(CONFIGURATIONS) * 10
    expected = {(c.depth, c.width, "added" if c.residual else "none", c.mlp) for c in CONFIGURATIONS}
    assert {entry[:4] for entry in seen} == expected
    assert size == "smoke" or len(study.seeds) >= 6, "six seeds support a claim"


def test_bad_requests_are_one_line():
    with pytest.raises(UsageError, match="size must be one of smoke, small, full"):
        StudySettings("huge")
    with pytest.raises(UsageError, match=f"{PAPER} has no study 'other'; studies: study"):
        shipped_studies(PAPER, StudySettings(studies=("other",)))
    with pytest.raises(UsageError, match="takes StudySettings, got str"):
        reproduce(PAPER, settings="small")


def test_the_smoke_size_runs_and_its_members_are_models(tmp_path):
    threads = torch.get_num_threads()
    settings = StudySettings("smoke", run=TrainingRun(directory=tmp_path))
    made = reproduce(PAPER, settings=settings)
    assert torch.get_num_threads() == threads
    assert made.statements[0].startswith("Of 13 published findings:")
    assert any(statement.startswith("Loop: mean field, initial") for statement in made.statements)
    reproduction_record(made, {}).save(tmp_path)
    record = load_record(tmp_path)
    assert len(stored_figures(record)) == len(made.figures) == 6
    assert record.arrays["2 layers, d 10/loss"].shape == (2, 10)
    assert write_reproduction_report(record, tmp_path).exists()
    trained = load_record(tmp_path / "studies" / "study")
    entry = trained.scalars["members"][20]
    model = load_model(str(tmp_path / "studies" / "study" / entry["model"]))
    assert model.config.architecture.depth == 2
    assert not (tmp_path / "studies" / "study" / "parts").exists()
