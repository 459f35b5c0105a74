"""`posbias measure A B C`: several models in one run, a record each; what fails, what is taken up again."""

import json
import shutil

import numpy as np
import pytest

import posbias as pb
from conftest import without_notes
from posbias import UsageError
from posbias.results.records import read_record
from posbias.runs.running import directory_names, held

FLAGS = ("--length", "16", "--count", "2", "--kinds", "probability", "--threads", "1")


@pytest.fixture(scope="module")
def other_llama(tiny_llama, tmp_path_factory):
    """The same architecture with other weights, in a directory of the same name."""
    directory = tmp_path_factory.mktemp("others") / tiny_llama.name
    shutil.copytree(tiny_llama, directory)
    model = pb.load_model(tiny_llama, init_seed=3)
    model.network.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def broken_llama(tiny_llama, tmp_path_factory):
    """Weights that overflow."""
    directory = tmp_path_factory.mktemp("others") / "broken"
    shutil.copytree(tiny_llama, directory)
    network = pb.load_model(tiny_llama).network
    network.get_output_embeddings().weight.data.mul_(1e38)
    network.model.norm.weight.data.mul_(1e30)
    network.save_pretrained(directory)
    return directory


def names_of(*sources):
    return list(directory_names([str(source) for source in sources]))


def test_each_model_has_the_record_it_has_when_measured_alone(posbias, tiny_llama, other_llama, tmp_path):
    out, alone = tmp_path / "both", tmp_path / "alone"
    result = posbias("measure", tiny_llama, other_llama, *FLAGS, "--out", out)
    assert result.returncode == 0, result.stderr
    names = names_of(tiny_llama, other_llama)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == sorted(names)
    assert (out / "report.html").is_file()
    for name, source in zip(names, (tiny_llama, other_llama), strict=True):
        assert posbias("measure", source, *FLAGS, "--out", alone / name).returncode == 0
        one, among = read_record(alone / name), read_record(out / name)
        assert among.arrays.keys() == one.arrays.keys()
        for key, array in one.arrays.items():
            np.testing.assert_array_equal(among.arrays[key], array)
        assert among.resolved["model"] == one.resolved["model"]
        assert among.arguments | {"out": None} == one.arguments | {"out": None}
        assert among.arguments["model"] == source.name
        assert not (out / name / "parts").exists()
        assert source.name in among.resolved["command"].split()
    first, second = (read_record(out / name).resolved["model"]["weights_sha256"] for name in names)
    assert first != second


def test_a_changed_model_under_the_same_name_is_not_taken_for_finished(posbias, tiny_llama, other_llama, tmp_path):
    copy, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_llama, copy)
    runs = []
    for change in (None, None, other_llama):
        if change is not None:
            shutil.copy(change / "model.safetensors", copy / "model.safetensors")
        assert posbias("measure", copy, *FLAGS, "--out", out, "--resume").returncode == 0
        runs.append(read_record(out).run_id)
    assert runs[0] == runs[1] != runs[2]


def test_a_model_that_fails_costs_its_own_record_only(posbias, tiny_llama, broken_llama, other_llama, tmp_path):
    sources = (tiny_llama, broken_llama, tmp_path / "absent", other_llama)
    result = posbias("measure", *sources, *FLAGS, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert len(without_notes(result.stderr)) == 1
    names = names_of(*sources)
    assert f"2 of 4 models failed, first {names[1]}: " in result.stderr
    records = [read_record(tmp_path / "out" / name) for name in names]
    assert [record.status for record in records] == ["done", "failed", "failed", "done"]
    assert "finite" in records[1].error
    assert records[2].error.startswith("model 'absent' ")


def test_resuming_measures_what_is_missing_and_a_finished_model_that_is_gone_costs_nothing_but_itself(
    posbias, tiny_llama, other_llama, tmp_path
):
    lost, out = tmp_path / "lost", tmp_path / "out"
    shutil.copytree(other_llama, lost)
    command = ("measure", tiny_llama, lost, other_llama, *FLAGS, "--out", out)
    names = names_of(tiny_llama, lost, other_llama)
    assert posbias(*command).returncode == 0
    before = {name: read_record(out / name).run_id for name in names}
    shutil.rmtree(lost)
    shutil.rmtree(out / names[2])
    result = posbias(*command, "--resume")
    assert result.returncode == 1
    assert f"1 of 3 models failed, first {names[1]}: model '" in result.stderr
    assert [read_record(out / name).status for name in names] == ["done"] * 3  # what was finished stays
    assert [read_record(out / name).run_id == before[name] for name in names] == [True, True, False]
    assert posbias("measure", tiny_llama, other_llama, *FLAGS, "--out", out, "--resume", "--seed", "1").returncode == 0
    again = read_record(out / names[0])  # another measurement: done again
    assert (again.run_id != before[names[0]], again.seeds) == (True, {"measure": 1})


def test_a_run_at_work_in_a_models_directory_is_left_alone(posbias, tiny_llama, other_llama, tmp_path):
    first, second = names_of(tiny_llama, other_llama)
    with held(tmp_path / second):
        result = posbias("measure", tiny_llama, other_llama, *FLAGS, "--out", tmp_path)
    assert (result.returncode, "another run is writing" in result.stderr) == (1, True)
    assert read_record(tmp_path / first).status == "done"
    assert not (tmp_path / second / "record.json").exists()


def test_no_model_is_measured_where_one_of_them_is_finished(posbias, tiny_llama, other_llama, tmp_path):
    _, second = names_of(tiny_llama, other_llama)
    assert posbias("measure", other_llama, *FLAGS, "--out", tmp_path / second).returncode == 0
    result = posbias("measure", tiny_llama, other_llama, *FLAGS, "--out", tmp_path)
    assert result.returncode == 2
    assert f"{second}' holds a finished run of posbias measure" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [second]


def test_json_is_one_document(posbias, tiny_llama, other_llama):
    result = posbias("measure", tiny_llama, other_llama, *FLAGS, "--json")
    assert result.returncode == 0
    models = json.loads(result.stdout)["models"]
    assert list(models) == names_of(tiny_llama, other_llama)
    assert all(
        abs(sum(entry["arrays"]["trained/measured/probability/influence"]) - 1) < 1e-9 for entry in models.values()
    )


def test_wrong_requests_leave_nothing(posbias, tiny_llama, other_llama, tmp_path):
    out = tmp_path / "out"
    for flags, message in [
        (("--kinds", "nonsense"), "unknown"),
        (("--prompts", "missing.txt"), "missing.txt"),
        (("--length", "1000"), "1000"),
    ]:
        result = posbias("measure", tiny_llama, other_llama, *FLAGS, *flags, "--out", out)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert not out.exists()
    result = posbias("measure", tiny_llama, tiny_llama, *FLAGS, "--out", out)
    assert result.returncode == 2
    assert "give each of them once" in result.stderr


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["demo", "Qwen/Qwen3-0.6B"], ["demo", "Qwen3-0.6B"]),
        (["a/base", "b/base", "b/other"], ["a-base", "b-base", "b-other"]),
        (["config:gpt2", "x.gguf"], ["gpt2", "x.gguf"]),
        (["../..", "a b/c:d"], None),
    ],
)
def test_names_of_directories(sources, names):
    found = directory_names(sources)
    assert list(found.values()) == sources
    assert names is None or list(found) == names
    assert all("/" not in name and not name.startswith(".") for name in found)


@pytest.mark.parametrize("sources", [[], ["demo", "demo"], ["config:demo", "demo"]])
def test_models_that_cannot_be_told_apart(sources):
    with pytest.raises(UsageError, match=r"no model to measure|give each of them once"):
        directory_names(sources)
