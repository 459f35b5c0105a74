"""Position copy: statements follow planted losses, the shipped studies parse, and the smoke size runs to its page."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import TrainOptions, UsageError, load_model, load_record, write_report
from posbias_papers import PAPERS, reproduce
from posbias_papers.findings import Seeded
from posbias_papers.liu2026.experiment import (
    CONFIGURATIONS,
    LN_V,
    ONE,
    PUBLISHED,
    TWO,
    orderless_loss,
    position_copy_findings,
)
from posbias_papers.reproduction import SIZES, StudySettings

PAPER = "position-copy-liu2026"


def seeded(rows):
    return Seeded(tuple(range(len(rows))), rows)


def planted(noise=0.01, seeds=6):
    """The published losses with a little noise, for every network whose values were read."""
    draw = np.random.default_rng(0)
    return {
        configuration: seeded(np.maximum(np.array(values) + draw.normal(0, noise, (seeds, 10)), 0))
        for configuration, values in PUBLISHED.items()
    }


def verdicts(losses):
    findings = position_copy_findings(losses)
    return {f"{finding.where}: {finding.reported[:20]}": finding.verdict for finding in findings}


def test_the_published_losses_bear_out_the_published_statements():
    found = verdicts(planted())
    assert set(found.values()) == {"reproduced"}, found
    assert len(found) == 13


def test_blind_networks_bear_out_none():
    draw = np.random.default_rng(1)
    found = verdicts({each: seeded(LN_V + draw.normal(0, 0.001, (6, 10))) for each in PUBLISHED})
    assert found["Figure 1, right: two layers differ in"] in ("undecided", "not reproduced")
    assert found["Figure 3: residual connections"] in ("undecided", "not reproduced")
    assert all(verdict != "reproduced" for where, verdict in found.items() if where.startswith("Numbers"))


def test_a_failed_member_shifts_no_pair():
    """The gain of a second layer is the same in every seed; seed 2 of one network failed."""
    draw = np.random.default_rng(2)
    own = draw.normal(0, 0.5, (7, 1))
    one, two = (seeded(np.array(PUBLISHED[each]) + own) for each in (ONE, TWO))
    short = Seeded((0, 1, 3, 4, 5, 6), np.delete(one.rows, 2, axis=0))
    finding = position_copy_findings({ONE: short, TWO: two})[1]
    test = finding.tests["first token, one layer minus two (1 seeds without their pair left out)"]
    assert test.n_seeds == 6
    assert test.mean.error == pytest.approx(test.mean.value / test.n_seeds), (
        "pairs of equal seeds differ by the gain alone"
    )
    assert test.interval.value == pytest.approx(2.19 - 1.13)
    apart = Seeded((7, 8, 9, 10, 11, 12), short.rows)
    assert not [case for case in position_copy_findings({ONE: apart, TWO: two})[1].tests if "first token" in case]


def test_what_was_not_trained_is_not_run_and_few_seeds_decide_nothing():
    assert set(verdicts({}).values()) == {"not run"}
    assert set(verdicts(planted(seeds=3)).values()) == {"undecided"}


@pytest.mark.parametrize("size", SIZES)
def test_every_size_trains_every_target_of_every_network(size):
    (study,) = PAPERS[PAPER]().studies(StudySettings(size)).values()
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
        PAPERS[PAPER]().studies(StudySettings(studies=("other",)))
    with pytest.raises(UsageError, match="takes StudySettings, got str"):
        reproduce(PAPER, settings="small")


def test_the_smoke_size_runs_and_its_members_are_models(tmp_path, monkeypatch):
    studies = PAPERS[PAPER].studies
    monkeypatch.setattr(  # one seed of two
        PAPERS[PAPER], "studies", lambda *asked: {name: replace(s, seeds=(0,)) for name, s in studies(*asked).items()}
    )
    threads = torch.get_num_threads()
    settings = StudySettings("smoke", run=TrainOptions(directory=tmp_path))
    made = reproduce(PAPER, settings=settings)
    assert torch.get_num_threads() == threads
    assert made.statements[0].startswith("Of 13 published findings:")
    stored = load_record(made.save(tmp_path))
    assert len(stored.figures) == len(made.figures) == 3
    names = [curve.name for curve in stored.figures[0].curves]
    assert names[:2] == ["1 layer, d 2", "1 layer, d 2, published"]
    assert stored.figures[0].curves[-1].y[0] == orderless_loss() == pytest.approx(1.7145, abs=5e-5)
    assert stored.arrays["2 layers, d 10/loss"].shape == (1, 10)
    assert write_report(stored, tmp_path).exists()
    entry = load_record(tmp_path / "studies" / "study").record.scalars["members"][20]
    model = load_model(str(tmp_path / "studies" / "study" / entry["model"]))
    assert model.config.architecture.depth == 2
    assert not (tmp_path / "studies" / "study" / "parts").exists()
