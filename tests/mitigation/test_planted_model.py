"""The judgement on a model with a planted bias: what is known to be wrong is found and cured, nothing else is.

A Llama of two layers is built to find one of eight documents, wherever it stands, without an error. Then its attention
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
from posbias import FitOptions, LocalResponder, MitigateOptions, fit
from posbias.architecture import KeyBias
from posbias.mitigation.judging import APPLY, GAINS, HARM, NOTHING
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


def key_bias(values):
    return f"key_bias(biases='key_bias(values={np.round(values, 6).tolist()})')"


CURE, HALF, IDLE = key_bias(-PLANTED), key_bias(-PLANTED / 2), "temperature(scale=0.001)"
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


HEADS = 4
KEY, VALUE, ASKED, HELD, ANSWER = (slice(8 * place, 8 * place + 8) for place in range(5))
"""Of the stream: what a document says, which key the question names, that key at the last token, and what it reads."""
PLAIN = 40
"""The coordinate of all other words."""
SLOW = [2, 3, 4, 5, 6, 7, 10, 11]
"""Coordinates of a head that rotary embeddings hardly turn within 64 tokens."""


@torch.no_grad()
def built():
    """A Llama whose first layer takes to the last token the key asked for, and whose second reads what stands by it."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        attn_implementation="eager",  # whose mask is always there to be added to
    )
    network = LlamaForCausalLM(config).eval()
    for parameter in network.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    generator, one = torch.Generator().manual_seed(0), torch.eye(ITEMS)
    words = 0.05 * torch.randn(len(WORDS), 64, generator=generator)  # so that samples differ in difficulty
    words[0, PLAIN] += 2**0.5
    words[1:FIRST_KEY, KEY] += one.repeat_interleave(ITEMS, 0)
    words[1:FIRST_KEY, VALUE] += one.repeat(ITEMS, 1)
    words[FIRST_KEY:FIRST_VALUE, ASKED] += 2**0.5 * one
    network.get_input_embeddings().weight.copy_(words)
    network.get_output_embeddings().weight.zero_()[FIRST_VALUE:, ANSWER] = 2 * one
    taking, reading = (layer.self_attn for layer in network.model.layers)
    for head in range(0, 16 * HEADS, 16):
        slow = [head + place for place in SLOW]
        taking.q_proj.weight[slow[0], : PLAIN + 1] = 1.0
        reading.q_proj.weight[slow, HELD] = one
        taking.o_proj.weight[HELD, slow] = reading.o_proj.weight[ANSWER, slow] = one / HEADS
        if head < 32:
            taking.k_proj.weight[slow[0], ASKED] = 1.0
            reading.k_proj.weight[slow, KEY] = 0.8 * one
            taking.v_proj.weight[slow, ASKED], reading.v_proj.weight[slow, VALUE] = 0.25 * one, 0.3 * one
    return network


@pytest.fixture(scope="module")
def built_at(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    save_questions(directory / "questions.jsonl", 400)
    for saved in (built(), word_tokenizer()):
        saved.save_pretrained(directory / "model")
    return directory, Documents(documents=ITEMS, file=str(directory / "questions.jsonl"))


@pytest.fixture(scope="module")
def task(built_at):
    return built_at[1]


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
def sound(built_at):
    return loaded(built_at[0], 0 * PLANTED)


@pytest.fixture(scope="module")
def biased(built_at):
    return loaded(built_at[0], PLANTED)


def scores_of(task, responder, *methods, count=24, **further):
    """The record of a run, by log-probability."""
    evaluation = pb.EvaluateOptions(count=count, positions=POSITIONS, generate=False)
    given = {"calibration": 0, "documents": 0, "short": False, **further}
    return trial_record(task, responder, MitigateOptions(methods=methods, evaluation=evaluation, **given))


def verdicts(record):
    return [verdict["verdict"] for verdict in record.scalars["judgement"]["verdicts"]]


def test_the_verdicts_are_those_of_what_was_planted(task, biased, sound):
    on_biased, on_sound = (scores_of(task, model, CURE, HALF, AWAY, IDLE) for model in (biased, sound))
    plain, cured, half = (on_biased.arrays[f"scores/logprob/{arm}"].mean(axis=0) for arm in range(3))
    middle = [POSITIONS.index(position) for position in MIDDLE]
    assert on_sound.arrays["scores/logprob/0"].mean() > -0.1, "it finds every document"
    assert (plain[middle] < -1).all()
    assert (np.delete(plain, middle) > -0.1).all(), "the ends are kept"
    assert (cured > -0.1).all(), "the opposite bias gives the middle back"
    assert (half[middle] > plain[middle] + 0.5).all()
    assert verdicts(on_biased) == [APPLY, APPLY, HARM, NOTHING]
    assert on_biased.scalars["judgement"]["recommended"] == CURE
    assert verdicts(on_sound)[0] == HARM, "the same bias makes a sound model heed its middle alone"
    assert verdicts(on_sound)[2:] == [HARM, NOTHING]
    assert not {*GAINS} & {*verdicts(on_sound)}


def test_a_fit_finds_the_bias_that_was_planted(task, biased):
    knots = (0, 24, 27, 30, 33, 36, 39, 42, 46)
    options = FitOptions(steps=150, rate=0.2, penalty=0.0, knots=knots)
    calibration = list(task.examples(biased.tokenizer, count=12, positions=POSITIONS))
    fitted = fit("key_bias", biased.model, calibration, options=options).method
    record = scores_of(task, biased, str(fitted), calibration=12)
    assert verdicts(record) == [APPLY]
    before, after = (record.arrays[f"scores/logprob/{arm}"].mean(axis=0) for arm in (0, 1))
    assert np.ptp(after) < np.ptp(before) / 2, "what both leave is nearly the same at every position"
