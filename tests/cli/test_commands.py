"""What holds of every command that makes a run: it prints what it saves, its page can be drawn again, and its directory
is not written over; and what no command takes is one line before any work.

What a command finds is the library's, and kept: tests/golden.
"""

import json

import pytest

from conftest import without_notes
from posbias.results.records import read_record

STUDY = """
task: position_copy(target=0, context=6, vocabulary=5)
model: {depth: 1, width: 8, residual: none}
train: {steps: 20, batch: 8, window: 5, evaluate_every: 10, examples: 10}
grid: {task.target: [0, 5]}
"""
SHORT = "--length 8 --count 2 --kinds probability"
ASKED = "--task key_value(pairs=2) --count 6 --max-tokens 1"
OTHERS = {
    "predict": "predict --depth 2 --length 8",
    "predict a grid": "predict --encoding none,alibi --depth 2 --length 8",
    "predict a model": "predict --model LONG --theory power_rollout(key_path=False) --length 8 --count 2",
    "attention": "attention LONG --length 16 --count 2",
    "design": "design power(exponent=1.0) --depth 6 --heads 2 --mixing 0.2 --length 32,64",
    "compare": "compare predict predict",
    "correlate": "correlate audit",
    "place": "place --run evaluate --scores 0.9,0.1",
    "verify": "verify wu2025/theorem-4.1",
}
RESUMED = {
    "measure": f"measure LONG {SHORT} --output at(position=-5)",
    "decompose": f"decompose LONG {SHORT} --interventions no_rope,window(width=3)",
    "audit": f"audit LONG {SHORT} --initialisations 0 --behaviour key_value(pairs=2) --behaviour-count 6 "
    "--behaviour-kinds probability --behaviour-max-tokens 1",
    "evaluate": f"evaluate LONG {ASKED}",
    "mitigate": f"mitigate LONG {ASKED} --calibration 0 --methods repeat_prompt --documents 0 --no-short",
    "train": "train study.yaml",
    "reproduce": "reproduce icl-2502.01951 --size smoke --study depth",
}
"""Commands that take over finished work."""
NEEDED = {"compare": ["predict"], "correlate": ["audit"], "place": ["evaluate"]}


@pytest.fixture
def command(posbias, long_llama, tmp_path, monkeypatch):
    """Runs a command with further flags, in a directory of its own with a study."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    commands = OTHERS | RESUMED

    def run(name, *flags):
        return posbias(*commands[name].replace("LONG", str(long_llama)).split(), *flags)

    return run


@pytest.mark.parametrize("name", [*OTHERS, *RESUMED])
def test_a_command_prints_what_it_saves_and_leaves_finished_work_alone(command, posbias, tmp_path, name):
    for needed in NEEDED.get(name, []):
        assert command(needed, "--out", needed).returncode == 0
    done = command(name, "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    printed, record, out = json.loads(done.stdout), read_record("run"), tmp_path / "run"
    if name != "verify":  # it prints its verdicts
        assert printed["scalars"] == record.as_json()["scalars"]
        assert printed["verdict"]
        for array, values in record.arrays.items():
            assert values.size == 0 or printed["arrays"][array] is not None
    verb = record.verb
    assert record.resolved["command"].startswith(f"posbias {verb} ")
    assert not {"json", "overwrite", "resume"} & set(record.arguments)
    assert str(tmp_path) not in json.dumps(record.resolved.get("model"))
    assert not list(out.rglob("parts"))

    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    again = posbias("report", "run")
    assert again.returncode == 0, again.stderr
    assert (out / "report.html").read_text() == page

    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    refused = command(name, "--out", "run")
    assert refused.returncode == 2
    assert f"'run' holds a finished run of posbias {verb} ({record.created}" in refused.stderr
    assert refused.stderr.endswith("--overwrite replaces it, or choose another --out\n")
    assert ("--resume takes over what is the same" in refused.stderr) == (name in RESUMED)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before, "nothing was touched"
    if name in RESUMED:
        assert command(name, "--out", "run", "--resume").returncode == 0
        assert read_record("run").run_id == record.run_id or name == "reproduce", "what was trained is judged again"
        alone = command(name, "--resume")
        assert "--resume needs --out" in alone.stderr or name == "audit", "an audit has a directory of its own"
    assert command(name, "--out", "run", "--overwrite").returncode == 0
    assert read_record("run").run_id != record.run_id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("attention LONG --sink-thresholds a", "--sink-thresholds: 'a': allowed are numbers, such as 0.2,0.3"),
        ("attention LONG --sink-thresholds 0.2,1.5", "a list that is not empty, each a number > 0 and < 1"),
        ("decompose LONG --interventions no_rop", "unknown intervention 'no_rop'"),
        ("decompose LONG --interventions no_rope,no_rope", "given 2 times"),
        ("decompose LONG --interventions window(width=0)", "width must be a whole number >= 1"),
        ("attention LONG --length 2", "at least 3 positions"),
        ("decompose LONG --length 2", "at least 3 positions, got 2"),
        ("decompose LONG --interventions no_alibi", "intervention no_alibi left posbias after 0.1.0"),
        ("design flat --length many", "--length: 'many': allowed are whole numbers"),
        ("design flat --over heads", "unknown free parameter 'heads'; known: gamma_key, key_bias"),
        ("design flat --measured-at 64", "--measured-at is read with --model only"),
        ("design flat --model config:x --measured-at all", "--measured-at: 'all': allowed are whole numbers"),
        ("design flat --device cpu", "--device is read with --model only"),
        ("design flat --initialisations 4", "--initialisations is read with --model only"),
        ("design flat --model config:x --depth 3", "--depth cannot be given with --model"),
        ("design flat --model demo", "write --model config:demo"),
        ("design nowhere.csv", "cannot read the target nowhere.csv"),
        ("design flat --mixing 0", "mixing is 0 in every layer: attention moves nothing"),
        ("design flat --length 2", "--length must be a whole number >= 3"),
        ("measure LONG --output first", "unknown output 'first'"),
        ("predict --model none --theory power_rollout(form=round)", "parameters of power_rollout: key_path, target"),
        ("predict --model none --theory power_rollout(target=logits)", "target must be one of jacobian, probability"),
        ("predict --model none --theory mean_field(level=last)", "unknown mean-field level 'last'"),
        ("predict --model none --theory rollout(mixing=1)", "theory rollout takes no parameters"),
        ("predict --model none --theory astrology(sign=leo)", "unknown theory 'astrology'"),
        ("predict --model none --theory power_rollout(", "is not a name or a literal call"),
        ("predict --model LONG --theory attention_only --prompts synthetic", "attention_only reads no --prompts"),
        ("predict --model LONG --theory attention_only --count 3", "attention_only needs none"),
    ],
)
def test_what_a_command_does_not_take_is_one_line_and_leaves_nothing(posbias, long_llama, tmp_path, given, message):
    refused = posbias(*given.replace("LONG", str(long_llama)).split(), "--out", tmp_path / "run")
    assert refused.returncode == 2
    assert message in refused.stderr
    assert len(without_notes(refused.stderr)) == 1
    assert not (tmp_path / "run").exists()


def test_where_a_devices_memory_runs_out_the_line_says_what_to_do(posbias, monkeypatch):
    def full(_sort):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory ...")

    monkeypatch.setattr("posbias.cli.listing.registered_variants", full)
    failed = posbias("list", "masks")
    assert failed.returncode == 1
    assert failed.stderr.startswith(
        "posbias: unexpected RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB; try"
    )
    assert failed.stderr.count("\n") == 1
