"""Fits on calibration samples: the loss falls, sharing is kept, recipes come back and belong to one model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import FitOptions, LocalResponder, UsageError, fit, mitigated
from posbias.evaluation.responders import Request
from posbias.interventions.keys import biased
from posbias.mitigation import fits
from posbias.mitigation.fitting import contents
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import Recipe, read_recipe, write_recipe
from posbias.tasks.language import LANGUAGE_TASKS, Documents, KeyValue, locate
from tiny_families import shaken_model

QUICK = FitOptions(steps=40, rate=0.3, penalty=0.1, knots=(0, 1, 30, 150))


@pytest.fixture(scope="module")
def model(long_llama):
    return pb.load_model(str(long_llama), dtype="float64")


@pytest.fixture(scope="module")
def calibration(model):
    return list(KeyValue(pairs=2).examples(model.tokenizer, count=4, seed=5))


@pytest.fixture(scope="module")
def text(model):
    return list(pb.load_prompts("default", model, n_positions=24, count=3, seed=0).token_ids)


@pytest.fixture(scope="module")
def fitted(model, calibration, text):
    return fit("key_bias", model, calibration, text=text, options=QUICK)


def test_the_answers_become_more_probable_on_calibration_prompts(fitted):
    losses = np.array(fitted.how["answer_loss"])
    rounds = losses.reshape(-1, 8).mean(axis=1)  # 4 samples at 2 positions: every prompt once
    assert rounds[-1] < rounds[0]
    assert fitted.how["text_loss"][0] == 0
    assert max(fitted.how["text_loss"]) > 0
    assert fitted.how["numbers"] == 2 * 4 * 3


def test_a_fitted_method_shows_itself(fitted):
    assert repr(fitted) == f"Fitted(method={fitted.method!r})"
    assert len(repr(fitted)) < 300


def test_a_fit_is_the_same_for_the_same_seed(model, calibration, text):
    options = FitOptions(steps=3, knots=(0, 1, 90), seed=4)
    first, again = (fit("key_bias", model, calibration, text=text, options=options) for _ in range(2))
    assert str(first.method) == str(again.method)


@pytest.mark.parametrize("from_question", [False, True])
def test_the_numbers_before_the_held_out_answers_get_worse_are_taken(model, calibration, from_question, monkeypatch):
    monkeypatch.setattr(fits, "STEPS_BETWEEN_CHECKS", 1)
    options = FitOptions(steps=40, rate=5.0, batch=2, held_out=0.3, penalty=0.0, from_question=from_question)
    found = fit("adapter(rank=1)", model, calibration, options=options)
    losses = found.how["held_out_loss"]
    assert model.tokenizer.decode(found.method.invocation) == ('}\n\nKey: "' if from_question else "")
    assert found.how["held_out_prompts"] == 2, "both positions of a sample"
    assert len(found.how["answer_loss"]) == len(losses) == 1 + int(np.argmin(losses)) + fits.PATIENCE < 40
    (held,) = {example.sample for example in calibration[-2:]}
    requests = [Request(prompt=one.prompt, answer=one.target) for one in calibration if one.sample == held]
    replies = answering_under(found.method, LocalResponder(model)).respond(requests, generate=False, score=True)
    mean = np.mean([-reply.score.logprob / reply.score.n_tokens for reply in replies])
    assert mean == pytest.approx(min(losses), abs=1e-4), "adapters are kept in float32"


def one_of_two(name, **further):
    """A line with two documents."""
    documents = [{"text": f"{name} sings.", "is_gold": True}, {"text": "No."}]
    return {"question": f"Who is {name}?", "documents": documents, **further}


@pytest.mark.parametrize("teacher", ["gold_alone", "best_place"])
def test_a_teacher_is_the_model_where_answers_are_easiest_and_right_ones_are_not_read(long_llama, tmp_path, teacher):
    model = pb.load_model(str(long_llama), dtype="float64")
    with torch.no_grad():
        for weights in model.network.parameters():
            weights.mul_(6.0)  # so that its answers differ from prompt to prompt
    path = tmp_path / "own.jsonl"
    path.write_text(
        "\n".join(json.dumps(one_of_two(name, answers=[f"{name}ish"])) for name in ("Ada", "Bo", "Cy", "Di"))
    )
    examples = list(Documents(file=str(path)).examples(model.tokenizer, count=4))
    unanswered = [replace(example, answers=("",), target="") for example in examples]
    options = FitOptions(steps=8, batch=1, rate=1e-9, held_out=0.0, penalty=0.0, teacher=teacher)
    found, again = (fit("adapter(rank=2)", model, one, options=options) for one in (examples, unanswered))
    assert found.method == again.method
    how, places = found.how, np.array([example.gold_position for example in examples])
    losses = np.array(how["answer_loss"])[np.argsort(fits._rounds(8, 8, np.random.default_rng(0)))]
    if teacher == "best_place":
        best = min(how["teacher_loss"], key=how["teacher_loss"].get)
        np.testing.assert_allclose(losses[places == best], 0, atol=1e-6)
        assert losses[places != best].min() > 0.01
    else:
        alone = list(Documents(file=str(path), setting="oracle").examples(model.tokenizer, count=4))
        replies = LocalResponder(model).respond([Request(one.prompt, stop=("\n",)) for one in alone])
        assert list(how["teacher_answers"].values()) == [reply.response.text for reply in replies]
        wanted = []
        for number, example in enumerate(examples):
            answer, parts = replies[number // 2].response.token_ids, []
            for prompt in (alone[number // 2].prompt, example.prompt):
                tokens = [*model.tokenizer(prompt).input_ids, *answer[:-1]]
                with torch.no_grad():
                    parts.append(model.network(torch.tensor([tokens])).logits[0, -len(answer) :].log_softmax(-1))
            wanted.append(float((parts[0].exp() * (parts[0] - parts[1])).sum(-1).mean()))
        np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-6)
    nearer = fit("adapter(rank=2)", model, unanswered, options=replace(options, steps=12, batch=4, rate=0.01)).how
    assert np.mean(nearer["answer_loss"][-4:]) < np.mean(nearer["answer_loss"][:4])
    with pytest.raises(UsageError, match=r"line 1 has no right answer; teacher='gold_alone' or 'best_place'"):
        fit("adapter", model, unanswered)


def test_a_high_penalty_keeps_ordinary_text(model, calibration, text):
    options = [FitOptions(steps=24, rate=0.3, penalty=penalty, knots=(0, 1, 150)) for penalty in (0.01, 1000.0)]
    loose, tight = (
        np.mean(fit("key_bias", model, calibration, text=text, options=one).how["text_loss"][-6:]) for one in options
    )
    assert tight < loose / 10


def test_what_stands_before_the_question_is_run_once_and_nothing_else_changes(model, calibration, text, monkeypatch):
    options = FitOptions(steps=20, rate=0.3, knots=(0, 1, 90), from_question=True)
    kept = fit("key_bias", model, calibration, text=text, options=options)
    monkeypatch.setattr(fits, "KEPT_BYTES", 0)
    again = fit("key_bias", model, calibration, text=text, options=options)
    assert kept.how == again.how
    request = Request(prompt=calibration[0].prompt, answer=calibration[0].target, passages=calibration[0].passages)
    reply = answering_under(kept.method, LocalResponder(model)).respond([request], generate=False, score=True)[0]
    one = fit("key_bias", model, calibration, options=replace(options, steps=8, penalty=0.0, rate=1e-9))
    plain = LocalResponder(model).respond([request], generate=False, score=True)[0]
    order = fits._rounds(len(calibration), 8, np.random.default_rng(0))
    expected = -plain.score.logprob / plain.score.n_tokens
    assert one.how["answer_loss"][int(np.argmin(order))] == pytest.approx(expected, rel=1e-5)
    assert reply.score.logprob > plain.score.logprob


@pytest.mark.parametrize("scales", [True, False])
def test_a_bias_of_the_context_makes_the_answers_more_probable(model, calibration, scales):
    found = fit("context_bias", model, calibration, options=FitOptions(steps=24, rate=0.3, scales=scales))
    assert found.how["numbers"] == 2 * 4 * (1 + scales)
    assert (found.method.scales is not None) is scales
    rounds = np.array(found.how["answer_loss"]).reshape(-1, 8).mean(axis=1)
    assert rounds[-1] < rounds[0]
    with (
        pytest.raises(UsageError, match="the model has 2 layers of 4 heads"),
        mitigated(model, "context_bias(values=[[1.0]])", passages=[(0, 4)]),
    ):
        pass


def test_a_gradient_flows_through_the_bias_of_every_key():
    model = shaken_model("qwen3")
    tokens = torch.arange(3, 11)[None]
    bias = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def output(table):
        with biased(model, "test", lambda layer, n: table if layer == 1 else torch.zeros_like(table)):
            return model.network(tokens).logits[0, -1, 7]

    table = bias.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(output(table), table)
    for head, key in ((0, 0), (1, 3), (3, 6)):
        step = torch.zeros_like(bias)
        step[head, key] = 0.01  # norms are taken in float32, whatever the model's type
        expected = (output(bias + step) - output(bias - step)) / 0.02
        torch.testing.assert_close(gradient[head, key], expected, rtol=1e-3, atol=1e-5)


def test_a_grid_is_searched_by_the_probability_of_the_answers(model, calibration):
    found = fit("temperature", model, calibration)
    scores = found.how["candidates"]
    assert str(found.method) == max(scores, key=scores.get)
    assert len(scores) == 6


def test_a_recipe_comes_back_for_its_own_model_alone(tmp_path, model, fitted):
    path = tmp_path / "recipe.json"
    write_recipe(path, fitted.method, model, fitted.how)
    assert read_recipe(path, model) == fitted.method
    with mitigated(model, str(path), strength=0.5) as changed:
        assert "strength=0.5" in changed.intervention
    other = shaken_model("llama")
    with pytest.raises(UsageError, match=r"recipe of another model, .*: its depth is 2, this model's 3"):
        mitigated(other, str(path)).install()
    whole = json.loads(path.read_text())
    for content, message in (
        (
            {**whole, "recipe": 2},
            "is not a recipe that this posbias reads: recipe: Input should be 1",
        ),
        ("{", r"recipe.json': is not JSON \(character 2: "),
        ([1], "recipe.json' is not a recipe that this posbias reads: content: "),
        ({"method": "temperature"}, "recipe.json' is not a recipe that this posbias reads: recipe: Field required"),
        ({**whole, "method": 3}, "method: Input should be a valid string"),
        ({**whole, "method": "magic"}, "recipe.json': unknown mitigation 'magic'; known: "),
        ({**whole, "model": "demo"}, "reads: model: "),
        ({**whole, "model": {"source": "x"}}, "recipe of another model, 'x': its model_type is None, this"),
        ({**whole, "fitted": [1]}, "reads: fitted: "),
        ({**whole, "fitted": {"samples": "a"}}, "fitted.samples: Input should be a valid list"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UsageError, match=message):
            read_recipe(path, model)
    path.write_text(json.dumps({**whole, "fitted": {"samples": ["a"], "steps": 3}}))
    assert Recipe.read(path).fitted.model_dump() == {"samples": ["a"], "steps": 3}
    with pytest.raises(UsageError, match=r"cannot read '.*none.json': No such file"):
        read_recipe(tmp_path / "none.json", model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_recipe_knows_its_model_in_another_precision_and_no_other(tmp_path, long_llama, dtype):
    """Fitted in bfloat16; users of transformers load float32. Weights of more bits cannot be compared."""
    path, whole = tmp_path / "recipe.json", pb.load_model(str(long_llama))
    write_recipe(path, MITIGATIONS.parse("temperature(scale=0.3)"), pb.load_model(str(long_llama), dtype=dtype), {})
    assert str(read_recipe(path, whole)) == "temperature(scale=0.3)"
    if dtype == "bfloat16":
        with torch.no_grad():
            next(whole.network.parameters()).mul_(1.5)
        with pytest.raises(UsageError, match=r"recipe of another model, .*: its weights_sha256 is"):
            read_recipe(path, whole)


def test_samples_are_known_again_in_other_prompts_and_never_taken_for_others(tmp_path):
    """By their items and answer: a judge's questions read alike, and words of small vocabularies come again."""
    judged = tmp_path / "pairs.jsonl"
    rows = [
        {
            "pair_id": str(row),
            "question": "Which?",
            "response_A": f"yes {row}",
            "response_B": f"no {row}",
            "label": "A>B",
        }
        for row in range(40)
    ]
    judged.write_text("\n".join(json.dumps(row) for row in rows))

    def seen(task, seed, count=20):
        return contents(list(LANGUAGE_TASKS.parse(task).examples(None, count=count, seed=seed)))

    for task in ("key_value(pairs=3)", "documents(documents=3)"):
        assert not seen(task, 0) & seen(task, 1), task
    every = list(LANGUAGE_TASKS.parse(f"pairwise(file={str(judged)!r})").examples(None, count=40))
    assert not contents(every[:40]) & contents(every[40:])
    for other in ("pairs=5", "pairs=3, query='before'", "pairs=3, query='both'", "pairs=3, chat=True"):
        fitted_to, other = seen("key_value(pairs=3)", 0), f"key_value({other})"
        assert all(contents([one]) & fitted_to for one in LANGUAGE_TASKS.parse(other).examples(None, count=20))


def test_passages_may_be_given_as_texts(long_llama):
    model = pb.load_model(str(long_llama))
    passages = ["one two three", "four five six"]
    prompt = f"Read.\n{passages[0]}\n{passages[1]}\nWhich one? "
    begins = [prompt.index(passage) for passage in passages]
    spans = [(begin, begin + len(passage)) for begin, passage in zip(begins, passages, strict=True)]
    located, _ = locate(prompt, spans, model.tokenizer)
    ids = torch.tensor([model.tokenizer(prompt).input_ids])

    def logits(**told):
        with torch.no_grad(), mitigated(model.network, "attention_calibration", **told):
            return model.network(input_ids=ids).logits

    texts = logits(passages=passages, prompt=prompt, tokenizer=model.tokenizer)
    assert texts.equal(logits(passages=located, tokenizer=model.tokenizer))
    for told, message in (
        ({"passages": passages}, "need prompt= and tokenizer="),
        ({"passages": passages[::-1], "prompt": prompt, "tokenizer": model.tokenizer}, "is not in the prompt behind"),
        ({"passages": ["seven"], "prompt": prompt, "tokenizer": model.tokenizer}, "passage 0, 'seven', is not in"),
    ):
        with pytest.raises(UsageError, match=message):
            mitigated(model.network, "context_bias(values=[[1.0]])", **told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": 3}, "3 calibration samples given; at least 4"),
        ({"text": []}, "needs windows of ordinary text, all of one length; got none"),
        ({"text": [np.arange(3), np.arange(5)]}, "all of one length; got 3 to 5 tokens"),
        ({"method": "positional_channel"}, "positional_channel has no parameters to fit; allowed: adapter, context_"),
        ({"method": "ms_poe"}, "no parameters to fit|unknown mitigation"),
        ({"method": "key_bias", "from_question": True, "bare": True}, "from_question needs prompts with passages"),
        ({"method": "context_bias", "ending": True}, "prompts that go on after their last passage; one ends there"),
        ({"method": "adapter", "from_question": True, "question": "}"}, "needs words that open the question in every"),
        ({"method": "adapter(invocation=[7, 7])"}, "not all calibration prompts hold the tokens from which on adapter"),
        ({"teacher": "best_place", "bare": True}, r"teacher='best_place' needs prompts that list passages.* 5-0 lists"),
        ({"knots": ()}, "fit: key_bias needs knots; allowed without any is context_bias"),
    ],
)
def test_what_cannot_be_fitted_is_refused(model, calibration, text, arguments, message):
    first = arguments.get("calibration", 4)
    samples = [example for example in calibration if int(example.sample.split("-")[1]) < first]
    if "bare" in arguments:
        samples = [replace(example, passages=()) for example in samples]
    if "ending" in arguments:
        samples = [replace(example, passages=((0, len(example.text)),)) for example in samples]
    samples = [replace(example, question=arguments.get("question", example.question)) for example in samples]
    given = {name: arguments[name] for name in ("from_question", "knots", "teacher") if name in arguments}
    options = FitOptions(**{"steps": 1, "knots": (0, 1), **given})
    with pytest.raises(UsageError, match=message):
        fit(arguments.get("method", "key_bias"), model, samples, text=arguments.get("text", text), options=options)
