"""The audit on a real (tiny) model: what it records, how it resumes, what it leaves out and says so."""

import numpy as np
import pytest

import posbias as pb
from posbias import AuditOptions, CompareOptions, Profile, UsageError, compare
from posbias.comparison.distances import Sample
from posbias.comparison.stored import ProfileRun
from posbias.models.networks import reinitialise
from posbias.runs import parts as storage
from posbias.runs.engines import Local
from theory_calls import power_rollout

LENGTH, COUNT = 24, 6
OPTIONS = AuditOptions(kinds=("jacobian(probes=2)", "probability"), initialisations=6)


@pytest.fixture(scope="module")
def finished(tiny_llama, tmp_path_factory):
    return pb.audit(
        tiny_llama, n_positions=LENGTH, prompts=COUNT, out=tmp_path_factory.mktemp("runs") / "a", options=OPTIONS
    )


def test_prompts_that_do_not_fill_a_device_share_passes_and_nothing_else_changes(tiny_llama, tmp_path, monkeypatch):
    model, passes = pb.load_model(tiny_llama, dtype="float64"), []
    model.network.register_forward_hook(lambda *_: passes.append(1))

    def audited(together: int):
        monkeypatch.setattr("posbias.measurement.units.prompts_together", lambda *_, **__: together)
        before, out = len(passes), tmp_path / str(together)
        audit = pb.audit(model, n_positions=LENGTH, prompts=COUNT, out=out, options=OPTIONS)
        return audit.record, len(passes) - before

    (alone, forward), (batched, forwards) = audited(1), audited(4)
    # Influence, mixing and theories read 6 passes; of 2 passes of several prompts theories cannot, and take 6 beside.
    assert (forward, forwards) == (6, 8)
    assert (alone.resolved["together"], batched.resolved["together"]) == (1, 4)
    assert alone.arrays.keys() == batched.arrays.keys()
    for name, values in alone.arrays.items():
        np.testing.assert_allclose(batched.arrays[name], values, rtol=1e-9, atol=1e-14, err_msg=name)


def test_the_audit_is_the_rooms_put_together(finished, tiny_llama):
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("default", model, n_positions=LENGTH, count=COUNT, seed=0)
    measured = pb.measure(model, prompts, kinds=OPTIONS.kinds)
    trained, initialised = finished.subjects
    assert (trained.name, initialised.name) == ("trained", "initialised")
    for kind in ("jacobian", "probability"):
        np.testing.assert_allclose(
            trained.measured[kind].profile.influence, measured.profiles[kind].influence, rtol=1e-5
        )
    explained = power_rollout(model, prompts)
    np.testing.assert_allclose(
        trained.theories["power_rollout"].profile.influence, explained.profile.influence, rtol=1e-6
    )
    architecture = pb.Architecture.from_model(model, mixing=measured.mixing)
    np.testing.assert_allclose(
        trained.theories["rollout"].profile.influence, pb.predict(architecture, LENGTH).profile.influence, rtol=1e-5
    )
    assert set(trained.theories) == {"attention_only", "rollout", "continuous", "power_rollout", "attention_rollout"}
    assert set(initialised.theories) == {*trained.theories, "mean_field"}


def test_initialisations_are_independent(finished, tiny_llama):
    reborn = reinitialise(pb.load_model(tiny_llama), 2)
    prompts = pb.load_prompts("default", reborn, n_positions=LENGTH, count=COUNT, seed=0)
    measured = pb.measure(reborn, prompts, kinds=OPTIONS.kinds)
    initialised = finished.subjects[1]
    np.testing.assert_allclose(
        initialised.measured["probability"].per_prompt[2], measured.per_prompt["probability"][2], rtol=1e-4
    )


def test_an_unknown_family_is_measured_and_what_is_missing_is_said(tmp_path):
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    GPTBigCodeForCausalLM(config).save_pretrained(tmp_path / "model")
    model = pb.load_model(tmp_path / "model")
    prompts = pb.load_prompts(np.arange(48).reshape(3, 16), model, n_positions=16, count=3)
    run = pb.audit(model, prompts=prompts, options=AuditOptions(initialisations=2))
    assert set(run.subjects[0].measured) == {"jacobian", "probability"}
    left_out = " ".join(run.record.scalars["left_out"])
    assert "power_rollout" in left_out
    assert "mean_field" in left_out


def test_a_configuration_has_no_trained_state(tiny_llama):
    prompts = np.arange(48).reshape(3, 16)
    model = pb.load_model(f"config:{tiny_llama}")
    run = pb.audit(model, prompts=pb.load_prompts(prompts, model, n_positions=16, count=3))
    assert [subject.name for subject in run.subjects] == ["initialised"]


def test_a_piece_read_back_has_its_arrays_in_their_own_order(tmp_path):
    arrays = {name: np.zeros(1) for name in ("theory/second", "theory/first")}
    storage.PartStore(tmp_path, {}).get("piece", lambda: arrays)
    assert list(storage.PartStore(tmp_path, {}).get("piece", dict)) == list(arrays)


def test_initialisations_that_would_share_a_prompt_or_are_none_at_all_are_refused(tiny_llama):
    for settings, said in (
        ({"initialisations": 7}, "initialisations must be at most the 2 prompts, one prompt for each; got 7"),
        ({"initialisations": 0, "init_seed": 4}, "initialisations must be at least 1 if the model itself is one"),
    ):
        with pytest.raises(UsageError, match=said):
            pb.audit(tiny_llama, n_positions=16, prompts=2, options=AuditOptions(**settings))


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


def other_measurement(tiny_llama, **settings):
    """The same model on other prompts, as many and as long as the audit's."""
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("default", model, n_positions=LENGTH, count=COUNT, seed=9)
    measured = pb.measure(model, prompts, kinds=["probability"], options=pb.MeasureOptions(**settings))
    return measured, measured.as_run()


def test_predictions_for_some_prompts_are_never_paired_with_other_prompts(finished, tiny_llama):
    measured, record = other_measurement(tiny_llama)
    compared = compare(finished.record, record).record
    blocks = {block["theory"]: block for block in compared.scalars["subjects"]["comparison"]["comparisons"]}
    theory = finished.subjects[0].theories["power_rollout"]
    assert theory.per_prompt is not None
    units = Sample.of(measured.per_prompt["probability"]).units
    single = [pb.compare(theory.profile, Profile(unit)).wasserstein for unit in units]
    block = blocks["power_rollout"]
    assert block["prompts"]["per_prompt"]["value"] == pytest.approx(np.median(single), rel=1e-9)


def test_the_seed_of_a_comparison_is_that_of_its_resamples(finished):
    seeds = (0, 0, 5)
    found = [compare(finished.record, finished.record, options=CompareOptions(seed=seed)).record for seed in seeds]
    assert [record.seeds["bootstrap"] for record in found] == [*seeds]
    first, again, other = (record.scalars["subjects"]["comparison"]["comparisons"] for record in found)
    assert first == again != other


def compared_profiles(*runs, **chosen):
    """What is compared with what, as (theory, kind), and the subject of either run."""
    compared = compare(*runs, options=CompareOptions(**chosen)).record
    blocks = compared.scalars["subjects"]["comparison"]["comparisons"]
    return {(block["theory"], block["kind"]) for block in blocks}, tuple(compared.resolved["subjects"].values())


def test_of_audits_the_trained_model_is_compared_unless_another_subject_is_named(finished):
    audited = finished.record
    trained, initialised = ProfileRun.from_record(audited).subjects
    for chosen, subject in (({}, trained), ({"subject": "initialised"}, initialised)):
        pairs, names = compared_profiles(audited, audited, **chosen)
        assert names == (subject.name, subject.name)
        assert pairs == {(theory, kind) for theory in subject.theories for kind in subject.measured}
    assert compared_profiles(audited, audited, theory="jacobian", kind="probability") == (
        {("jacobian", "probability")},
        ("trained", "trained"),
    )


def test_of_an_audit_the_subject_is_compared_that_the_other_run_has_alone(finished, tiny_llama):
    model = pb.load_model(tiny_llama, init_seed=3)
    prompts = pb.load_prompts("default", model, n_positions=LENGTH, count=2, seed=9)
    born = pb.measure(model, prompts, kinds="probability").as_run()
    assert compared_profiles(finished.record, born)[1] == ("initialised", "initialised")
    assert compared_profiles(finished.record, born, subject="trained")[1] == ("trained", "initialised")
    assert compared_profiles(born, finished.record, kind="jacobian") == (
        {("probability", "jacobian")},
        ("initialised", "initialised"),
    )


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"theory": "rolout"}, "first run holds no profile 'rolout'; it holds: jacobian, probability, attention_only"),
        ({"kind": "rollout"}, "second run holds no profile 'rollout'; it holds: jacobian, probability$"),
        ({"subject": "born"}, "subject 'born': choose one of trained, initialised"),
    ],
)
def test_what_a_run_does_not_hold_is_listed(finished, chosen, complaint):
    with pytest.raises(UsageError, match=complaint):
        compare(finished.record, finished.record, options=CompareOptions(**chosen))


def test_settings_of_loading_are_refused_beside_a_loaded_model(tiny_llama, tmp_path):
    with pytest.raises(UsageError, match=r"init_seed=0 goes with a model's name; .* is loaded already"):
        pb.audit(pb.load_model(tiny_llama), prompts=2, out=tmp_path, options=AuditOptions(init_seed=0))
    assert not list(tmp_path.iterdir())
