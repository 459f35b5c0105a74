"""`posbias correlate` end to end: what is printed is saved, errors are one line."""

import numpy as np

import posbias as pb
from behaviour_runs import GOLD, saved
from posbias.evaluation import correlate_runs


def test_the_command_reads_audits_and_their_behaviour_and_saves_what_it_prints(posbias, tmp_path):
    saved().save(tmp_path / "audit" / "behaviour")
    saved(model="other").save(tmp_path / "other")
    result = posbias("correlate", tmp_path / "audit", tmp_path / "other", "--out", tmp_path / "tied")
    assert result.returncode == 0, result.stderr
    assert "rank correlation" in result.stdout
    record = pb.load_record(tmp_path / "tied")
    again = correlate_runs([saved(), saved(model="other")])
    assert record.scalars["pooled"] == again.scalars["pooled"]
    np.testing.assert_array_equal(
        record.arrays["groups/1/influence/measured/logprob/gold"], saved(model="other").arrays[GOLD]
    )
    refused = posbias("correlate", tmp_path, "--out", tmp_path / "none")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()
