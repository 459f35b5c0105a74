"""The heat map of a text shows the influence of every token."""

import re

import numpy as np
import pytest

import posbias as pb

TEXTS = ["a fox <b>jumps", "over & under.."]


@pytest.fixture(scope="module")
def model(tiny_llama):
    return pb.load_model(tiny_llama)


@pytest.fixture(scope="module")
def measurement(model):
    ids = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    prompts = pb.load_prompts(ids, model, n_positions=14, count=2)
    return pb.measure(model, prompts, kinds=["jacobian(probes=2)", "logit"])


def spans(html):
    """(colour, number in the tooltip, text) of every token."""
    found = re.findall(
        r'<span style="background:rgba\((.*?)\)" title="position \d+: (\S+) x uniform(.*?)">(.*?)</span>', html
    )
    return [(colour, float(number), rest, text) for colour, number, rest, text in found]


def test_every_token_stands_with_its_influence_in_multiples_of_the_uniform_share(measurement):
    shown = spans(measurement.tokens(prompt=1, kind="logit")._repr_html_())
    assert "".join(text for *_, text in shown) == "over &amp; under.."
    own = measurement.per_prompt["logit"][1]
    np.testing.assert_allclose([number for _, number, _, _ in shown], 14 * own / own.sum(), rtol=5e-3)
    for colour, number, rest, _ in shown:
        assert colour.startswith("213,94,0" if number > 1 else "0,114,178")
        assert rest == ""


def test_markup_of_a_text_is_text(measurement):
    html = measurement.tokens()._repr_html_()
    assert "<b>jumps" not in html
    assert "&lt;" in html


def test_wrong_requests_are_refused_and_a_record_keeps_no_text(measurement, tmp_path):
    for arguments, said in (
        ({"prompt": 2}, "prompt must be a whole number >= 0 and < 2, got 2"),
        ({"kind": "probability"}, "kind must be one of jacobian, logit"),
    ):
        with pytest.raises(pb.UsageError, match=said):
            measurement.tokens(**arguments)
    directory = measurement.save(tmp_path / "run")
    assert all(b"jumps" not in path.read_bytes() for path in directory.iterdir())
    with pytest.raises(pb.UsageError, match="holds no text"):
        pb.load_record(directory).tokens()
