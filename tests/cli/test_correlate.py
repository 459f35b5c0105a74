"""`posbias correlate` end to end: what is printed is saved, errors are one line."""

import pytest

import posbias as pb
from behaviour_runs import saved
from posbias import correlate
from posbias.evaluation.correlate import InfluenceCorrelation


def test_the_command_reads_audits_and_their_behaviour_and_saves_what_it_prints(posbias, tmp_path):
    saved().save(tmp_path / "audit" / "behaviour")
    saved(model="other").save(tmp_path / "other")
    result = posbias("correlate", tmp_path / "audit", tmp_path / "other", "--out", tmp_path / "tied")
    assert result.returncode == 0, result.stderr
    assert "rank correlation" in result.stdout
    record = pb.load_record(tmp_path / "tied")
    again = correlate([saved(), saved(model="other")])
    assert record.pooled == again.pooled
    refused = posbias("correlate", tmp_path, "--out", tmp_path / "none")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("plain", "held", "begins", "says"),
    [
        (0.4, None, "It is not established that", "answered better: rank correlation 0.400 [0.300, 0.500] over 10"),
        (0.6, None, "Positions with more influence are answered better", "position alone may explain it"),
        (0.6, 0.7, "Positions with more influence are answered better", "beyond position and ends: rank correlation"),
        (-0.6, None, "Positions with more influence are answered worse", "-0.600 [-0.700, -0.500]"),
    ],
)
def test_the_verdict_says_whether_what_weighs_is_used(plain, held, begins, says):
    """What is established here has a size of at least .5."""
    result = correlate([saved(), saved(model="other")])
    entry = next(entry for entry in result.record.scalars["pooled"] if entry["source"] == "measured")
    for found in entry["correlations"]["accuracy"]["correlations"]:
        value = {"nothing": plain, "position_and_ends": held}.get(found["controlled"])
        if value is not None:
            interval = {"value": value, "low": value - 0.1, "high": value + 0.1}
            found.update(value=interval, established=abs(value) >= 0.5)
    (verdict,) = InfluenceCorrelation.from_record(result.record).verdict
    assert verdict.startswith(begins)
    assert says in verdict
