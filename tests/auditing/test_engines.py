"""An audit in worker processes: the record of an audit in one process, bit for bit."""

import numpy as np
import pytest

import posbias as pb
from posbias import AuditOptions, UsageError
from posbias.runs.engines import Local


@pytest.mark.slow  # workers of `measure` and of influence are tested fast
def test_workers_give_the_same_record_and_finish_what_one_process_began(tiny_llama, tmp_path):
    def audited(workers, out=None, resume=False):
        options = AuditOptions(
            kinds=("probability",), initialisations=1, resume=resume, engine=Local(workers=workers, threads=1)
        )
        return pb.audit(tiny_llama, n_positions=16, prompts=2, out=out, options=options).record

    one, two = audited(1), audited(2, tmp_path / "run")
    assert one.arrays.keys() == two.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(two.arrays[name], array, err_msg=name)
    assert two.resolved["engine"] == {"name": "local", "threads": 1, "workers": 2}
    assert one.resolved["fingerprint"] == two.resolved["fingerprint"]
    assert audited(1, tmp_path / "run", resume=True).run_id == two.run_id


def test_weights_on_disk_are_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr("transformers.integrations.accelerate.get_max_memory", lambda *_, **__: {"cpu": 60_000})
    options = AuditOptions(device="spread")
    with pytest.raises(UsageError, match="need all weights in place, and some are on disk"):
        pb.audit(tiny_llama, n_positions=16, prompts=2, options=options)
