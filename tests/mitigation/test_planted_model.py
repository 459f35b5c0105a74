"""The judgement on a trained model with a planted bias: what is known to be wrong is found and cured, nothing else is.

A Llama of two layers learns to find one of eight documents, wherever it stands, without an error. Then its attention
gets a fixed key bias of the middle, as if it had been born with it: how much is lost, and what undoes it, is known.
"""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import posbias as pb
from planted import trial_record
from posbias.architecture.keys import KeyBias
from posbias.evaluation.responders import LocalResponder
from posbias.interventions.keys import KeyBiased
from posbias.mitigation import MitigateOptions
from posbias.mitigation.fitting.base import FitOptions
from posbias.mitigation.fitting.fit import fit
from posbias.mitigation.judging.changes import MEAN, WORST
from posbias.mitigation.judging.judge import ArmScores, JudgeOptions, judge
from posbias.mitigation.judging.verdicts import APPLY, GAINS, HARM, NOTHING
from posbias.tasks.language import Documents

ITEMS, POSITIONS = 8, (0, 2, 4, 5, 7)
MIDDLE = (2, 4, 5)
WORDS = (
    "<unk>",
    *(f"k{key}v{value}" for key in range(ITEMS) for value in range(ITEMS)),
    *(f"k{key}" for key in range(ITEMS)),
    *(f"v{value}" for value in range(ITEMS)),
)
FIRST_KEY, FIRST_VALUE = WORDS.index("k0"), WORDS.index("v0")
DEPTH = 6.0
"""Nats that the keys of the middle documents are planted below the others."""
PLANTED = -DEPTH * np.interp(np.arange(64), [24, 27, 39, 42], [0, 1, 1, 0])
"""By token."""
PASSAGES = range(22, 44, 3)
"""The documents' tokens."""
RUNS = 500


def key_bias(values):
    return f"key_bias(biases='key_bias(values={np.round(values, 6).tolist()})')"


CURE, HALF, IDLE = key_bias(-PLANTED), key_bias(-PLANTED / 2), "initial_token(gamma=1.0)"
AWAY = key_bias(-2 * DEPTH * (np.arange(64) == 43))
"""From the last document, which the planted bias does not touch."""


def save_questions(path, count):
    generator = np.random.default_rng(1)
    lines = []
    for _ in range(count):
        keys, values, gold = generator.permutation(ITEMS), generator.permutation(ITEMS), generator.integers(ITEMS)
        documents = [{"text": f"k{keys[item]}v{values[item]}", "is_gold": bool(item == gold)} for item in range(ITEMS)]
        lines.append({"question": f"k{keys[gold]}", "answers": [f"v{values[gold]}"], "documents": documents})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def word_tokenizer():
    """One token to a word; of the instruction none is known."""
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def trained(tokenizer, example):
    """Half a minute of a core; taught to name the value behind the key asked for, and behind the last token."""
    template = torch.tensor(tokenizer(example.prompt)["input_ids"])
    slots = [place for place, token in enumerate(template.tolist()) if 0 < token < FIRST_KEY]
    (asked,) = [place for place, token in enumerate(template.tolist()) if token >= FIRST_KEY]
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        attn_implementation="eager",  # whose mask is always there to be added to
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=500, pct_start=0.1)
    for _ in range(500):
        keys, values = (torch.argsort(torch.rand(64, ITEMS, generator=generator), 1) for _ in range(2))
        gold = torch.randint(ITEMS, (64, 1), generator=generator)
        tokens = template.repeat(64, 1)
        tokens[:, slots] = 1 + keys * ITEMS + values
        tokens[:, asked] = FIRST_KEY + keys.gather(1, gold)[:, 0]
        right = FIRST_VALUE + values.gather(1, gold)
        logits = network(tokens, logits_to_keep=len(template) - asked).logits
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), right.expand(-1, logits.shape[1]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network.eval()


@pytest.fixture(scope="module")
def trained_at(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    save_questions(directory / "questions.jsonl", 400)
    task, tokenizer = Documents(documents=ITEMS, file=str(directory / "questions.jsonl")), word_tokenizer()
    network = trained(tokenizer, next(task.examples(tokenizer, count=1, positions=(0,))))
    for saved in (network, tokenizer):
        saved.save_pretrained(directory / "model")
    return directory, task


@pytest.fixture(scope="module")
def task(trained_at):
    return trained_at[1]


def loaded(directory, planted):
    model = pb.load_model(str(directory / "model"))
    model.network.set_attn_implementation("eager")
    bias = torch.tensor(KeyBias(tuple(planted)).key_logits(len(planted), 1)[0], dtype=torch.float32)

    def add(_, given, named):
        mask = named["attention_mask"]
        return given, {**named, "attention_mask": mask + bias[: mask.shape[-1]]}

    for layer in model.network.model.layers:
        layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
    return LocalResponder(model)


@pytest.fixture(scope="module")
def sound(trained_at):
    return loaded(trained_at[0], 0 * PLANTED)


@pytest.fixture(scope="module")
def biased(trained_at):
    return loaded(trained_at[0], PLANTED)


def scores_of(task, responder, *methods, count=40, **further):
    """The record of a run, by log-probability."""
    evaluation = pb.EvaluateOptions(count=count, positions=POSITIONS, generate=False)
    given = {"calibration": 0, "documents": 0, "short": False, **further}
    return trial_record(task, responder, MitigateOptions(methods=methods, evaluation=evaluation, **given))


@pytest.fixture(scope="module")
def many(task, biased):
    """Scores of 150 samples, [sample, position]: unchanged, cured, half cured."""
    record = scores_of(task, biased, CURE, HALF, count=150)
    return [record.arrays[f"scores/logprob/{arm}"] for arm in range(3)]


def verdicts(record):
    return [verdict["verdict"] for verdict in record.scalars["judgement"]["verdicts"]]


def test_the_middle_is_lost_as_planted_and_the_opposite_bias_gives_it_back(task, sound, many):
    plain, cured, half = many
    middle = [POSITIONS.index(position) for position in MIDDLE]
    assert scores_of(task, sound, IDLE).arrays["scores/logprob/0"].mean() > -0.1, "it finds every document"
    assert (plain.mean(axis=0)[middle] < -1).all()
    assert (np.delete(plain.mean(axis=0), middle) > -0.1).all(), "the ends are kept"
    assert (cured.mean(axis=0) > -0.1).all()
    assert (half.mean(axis=0)[middle] > plain.mean(axis=0)[middle] + 0.5).all()


def test_the_verdicts_are_those_of_what_was_planted(task, biased, sound):
    on_biased, on_sound = (scores_of(task, model, CURE, HALF, AWAY, IDLE) for model in (biased, sound))
    assert verdicts(on_biased) == [APPLY, APPLY, HARM, NOTHING]
    assert on_biased.scalars["judgement"]["recommended"] == CURE
    assert verdicts(on_sound)[0] == HARM, "the same bias makes a sound model heed its middle alone"
    assert verdicts(on_sound)[2:] == [HARM, NOTHING]
    assert not {*GAINS} & {*verdicts(on_sound)}


def test_a_lost_beginning_is_told_from_a_lost_middle(task, trained_at):
    lost = -DEPTH * np.interp(np.arange(64), [21, 22, 30, 33], [0, 1, 1, 0])
    record = scores_of(task, loaded(trained_at[0], lost), key_bias(-lost), CURE, IDLE)
    before = record.arrays["scores/logprob/0"].mean(axis=0)
    assert (before[:2] < -1).all()
    assert (before[2:] > -0.1).all()
    assert verdicts(record) == [APPLY, HARM, NOTHING], "the cure of the middle is not that of the beginning"


def test_a_fit_finds_the_bias_that_was_planted(task, biased):
    knots = (0, 24, 27, 30, 33, 36, 39, 42, 46)
    options = FitOptions(steps=300, rate=0.2, penalty=0.0, knots=knots, shared="both")
    calibration = list(task.examples(biased.tokenizer, count=12, positions=POSITIONS))
    fitted = fit("key_bias", biased.model, calibration, options=options).method
    record = scores_of(task, biased, str(fitted), calibration=12)
    assert verdicts(record) == [APPLY]
    found = KeyBiased(fitted.biases).layers(2)[0].key_logits(64, 4)[0]
    left = (found + PLANTED)[[PASSAGES[position] for position in POSITIONS]]
    assert np.ptp(left) < DEPTH / 2, "what both leave is nearly the same at every position that was asked for"


def test_a_gain_is_found_in_most_runs_and_its_interval_holds_the_true_one(many):
    plain, cured, _ = many
    generator = np.random.default_rng(0)
    found = covered = 0
    for _ in range(60):
        rows = generator.choice(len(plain), size=40, replace=False)
        (verdict,) = judge(plain[rows], [ArmScores("cure", cured[rows])], positions=POSITIONS).verdicts
        change = verdict.changes[MEAN].value
        found += verdict.verdict in GAINS and verdict.changes[MEAN].detectable < (cured - plain).mean()
        covered += change.low <= (cured - plain).mean() <= change.high
    assert found >= 57
    assert covered >= 54


def test_no_gain_is_found_where_real_scores_have_none(many):
    """Half of the samples, drawn anew for every run, have their two scores exchanged: on average nothing changes."""
    plain, _, half = many
    generator, options = np.random.default_rng(0), JudgeOptions(draws=0)
    found = []
    for _ in range(RUNS):
        rows = generator.choice(len(plain), size=40, replace=False)
        swapped = generator.random((40, 1)) < 0.5
        before, after = np.where(swapped, half[rows], plain[rows]), np.where(swapped, plain[rows], half[rows])
        (verdict,) = judge(before, [ArmScores("none", after)], positions=POSITIONS, options=options).verdicts
        found.append(verdict.verdict)
    assert sum(each in GAINS for each in found) <= 0.05 * RUNS
    assert found.count(HARM) <= 0.05 * RUNS
    assert WORST in verdict.changes
