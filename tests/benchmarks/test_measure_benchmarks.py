"""The benchmark of measuring runs: every part, its assertions, its record."""

import pytest

from posbias.results.records import read_record

OWN = ("floor", "posbias", "posbias, checkpointing", "posbias, with mixing")
PARTS = ("gradients", "demo", "memory", "attention", "attention-memory", "jacobians", "prompts")

# PyTorch warns where it cannot batch an operation; the benchmark's command does not show it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def parts(script, monkeypatch):
    """The parts, with few Jacobian draws, memory read in this process, and a random model in the demo's place."""
    module, subject = script("parts"), script("subject")
    extra_megabytes = script("peak").extra_megabytes
    # One more: so few positions need not raise the peak at all, and rows are divided by the floor's.
    monkeypatch.setattr(module, "extra_megabytes", lambda *given: 1 + extra_megabytes(*given))
    monkeypatch.setattr(module, "load_model", lambda _: subject.random_llama(tiny(script)))
    monkeypatch.setattr(
        module, "load_prompts", lambda *_, n_positions, count: subject.random_prompts(count, n_positions)
    )
    monkeypatch.setattr(script("jacobians"), "SEEDS", 2)
    monkeypatch.setattr(script("jacobians"), "PROBES", (4,))
    return module


@pytest.fixture
def plan(parts, script):
    """Every part at 16 or 32 positions, without peers."""
    return parts.Plan(
        size=tiny(script),
        small=tiny(script),
        lengths=(16, 32),
        demo_positions=16,
        attention_lengths=(16,),
        attention_memory_lengths=(16, 32),
        jacobian_positions=16,
        prompts=2,
        prompt_positions=16,
        repeats=1,
        methods=OWN,
    )


def tiny(script):
    return script("subject").Size(layers=2, width=32, heads=2)


@pytest.mark.parametrize("part", PARTS)
def test_methods_of_a_part_agree_and_every_row_is_a_number(parts, plan, part):
    tables = list(parts.PARTS[part](plan))
    assert tables
    for table in tables:
        assert table.text()
        for row in table.rows.values():
            assert all(value >= 0 for value in row.values()), row  # NaN fails


def test_attention_that_differs_is_not_measured(parts, plan, script, monkeypatch):
    dense = script("attention").METHODS["eager, dense rollout"]
    wrong = {"eager, dense rollout": lambda model, prompts: lambda: 1.01 * dense(model, prompts)()}
    monkeypatch.setattr(script("attention"), "METHODS", {**script("attention").METHODS, **wrong})
    for part in (parts.time_attention, parts.attention_memory):
        with pytest.raises(AssertionError, match="posbias, rollout"):
            next(part(plan))


def test_the_record_holds_what_was_printed(plan, script, tmp_path, capsys):
    script("run").run(plan, ["gradients", "jacobians"], arguments={"repeats": 1}, out=tmp_path)
    printed = capsys.readouterr().out
    record = read_record(tmp_path)
    assert (record.verb, record.status) == ("benchmark", "done")
    assert [table["part"] for table in record.scalars["tables"]] == ["gradients"] * 2 + ["jacobians"] * 2
    for table in record.scalars["tables"]:
        for name, row in table["rows"].items():
            line = next(line for line in printed.splitlines() if line.startswith(f"  {name}"))
            assert all(f"{value:.3f}" in printed for value in row.values()), line
    resolved = record.resolved
    assert resolved["lengths"] == [16, 32]
    assert resolved["size"] == {"layers": 2, "width": 32, "heads": 2}
    assert resolved["repeats"] == 1
    assert resolved["threads"] >= 1
    assert {"torch", "transformers", "captum", "inseq"} <= set(record.environment["packages"])
