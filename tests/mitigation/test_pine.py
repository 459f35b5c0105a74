"""PINE: the order of documents makes no difference, and every query has them where the paper puts them."""

import math

import numpy as np
import pytest
import torch

from posbias import UsageError, mitigated
from posbias.architecture import Causal, SlidingWindow
from posbias.interventions.base import AttentionCall
from posbias.mitigation.methods import pine
from posbias.mitigation.methods.pine import windows_of
from posbias.models.layout import turned_by
from tiny_families import VOCABULARY, shaken_model

LENGTHS = (3, 5, 2, 4)
BEFORE, BEHIND = 3, 4


SEPARATOR = 11


def prompt(order, *, separated=False):
    """Token ids whose documents stand in some order, and where they do; separated: a token before each, the first's its
    own."""
    generator = np.random.default_rng(8)
    before, *documents, behind = (
        generator.integers(3, VOCABULARY, length).tolist() for length in (BEFORE, *LENGTHS, BEHIND)
    )
    ids, spans = list(before), []
    for document in order:
        begin = len(ids)
        ids += [*([SEPARATOR] if separated else []), *documents[document]]
        spans.append((begin + (separated and begin > BEFORE), len(ids)))
    return [*ids, *behind], spans


@torch.no_grad()
@pytest.mark.parametrize("separated", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "smollm3"])
def test_the_order_of_documents_makes_no_difference(family, separated):
    model = shaken_model(family)
    if getattr(model.network.config, "sliding_window", None):
        model.network.config.sliding_window = 64
    found, plain = [], []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)):
        ids, spans = prompt(order, separated=separated)
        with mitigated(model, "pine", passages=spans):
            found.append(model.network(model.token_tensor([ids])).logits[0, -BEHIND:])
        plain.append(model.network(model.token_tensor([ids])).logits[0, -BEHIND:])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)
    assert min(float((other - plain[0]).abs().max()) for other in plain[1:]) > 0.01, "without it the order matters"


def naive(query, key, value, spans, frequencies, *, strength, reach):
    """One head's outputs from queries and keys without positions, one query at a time, by the paper's rule."""
    n_tokens, (begin, end) = len(query), (spans[0][0], spans[-1][1])
    owner = {token: index for index, span in enumerate(spans) for token in range(*span)}
    scale = query.shape[1] ** -0.5

    def turn(vector, position):
        half = len(frequencies)
        cosine, sine = np.cos(position * frequencies), np.sin(position * frequencies)
        return np.concatenate(
            [vector[:half] * cosine - vector[half:] * sine, vector[half:] * cosine + vector[:half] * sine]
        )

    def sees(token):
        own = owner.get(token)
        later = [place for place in range(token + 1, end) if own is not None and owner[place] != own]
        return [place for place in (*range(token + 1), *later) if abs(place - token) < reach]

    def importance(token, own):
        others = [place for place in sees(token) if begin <= place < end and owner[place] != own]
        weights = np.exp([scale * query[token] @ key[place] for place in others])
        shares = dict(zip(others, weights / weights.sum(), strict=True))
        return np.array([sum(shares.get(place, 0.0) for place in range(*span)) / (span[1] - span[0]) for span in spans])

    outputs = []
    for token in range(n_tokens):
        own = owner.get(token)
        places = dict(enumerate(range(n_tokens)))
        if token >= begin:
            asking = range(*spans[own]) if own is not None else [token]
            score = sum(importance(each, own) for each in asking)
            if own is not None:
                score[own] = math.inf
            last = end
            for document in np.argsort(-score):
                first, stop = spans[document]
                last -= stop - first
                places |= {place: last + place - first for place in range(first, stop)}
        seen = sees(token)
        moved = {place: place + strength * (places[place] - place) for place in range(n_tokens)}
        logits = [
            scale * turn(query[token], moved[token]) @ turn(key[place], moved[place])
            + math.log(strength) * (place > token)
            for place in seen
        ]
        weights = np.exp(logits)
        outputs.append(weights / weights.sum() @ value[seen])
    return np.array(outputs)


@pytest.mark.parametrize(("strength", "reach"), [(1.0, None), (0.3, None), (1.0, 7), (0.3, 4)])
def test_attention_is_that_of_queries_and_keys_put_where_the_paper_puts_them(monkeypatch, strength, reach):
    monkeypatch.setattr(pine, "BLOCK", 5)
    _, spans = prompt((1, 0, 3, 2))
    n_tokens = spans[-1][1] + BEHIND
    generator = np.random.default_rng(2)
    frequencies = np.array([1.0, 0.3, 0.05])
    query, key, value = (generator.normal(size=(heads, n_tokens, 6)) for heads in (4, 2, 2))
    positions = torch.arange(n_tokens)[None]
    whole = torch.tensor(frequencies)

    def rotated(plain):
        angles = positions[:, None, :, None] * whole
        return turned_by(torch.tensor(plain)[None], angles.cos(), angles.sin())

    call = AttentionCall(
        layer=0,
        module=torch.nn.Identity(),
        query=rotated(query),
        key=rotated(key),
        value=torch.tensor(value)[None],
        mask=None if reach is None else within(n_tokens, reach),
        options={},
        query_positions=positions,
        key_positions=positions,
        kernel=lambda *given: given,
        slots=n_tokens,
    )
    mask = Causal() if reach is None else SlidingWindow(reach)
    documents = pine.Documents(windows_of(spans), strength, whole, mask)
    output, _ = documents.attended(call, torch.tensor(key)[None])
    asked = {"strength": strength, "reach": reach or n_tokens}
    for head in range(4):
        expected = naive(query[head], key[head // 2], value[head // 2], spans, frequencies, **asked)
        np.testing.assert_allclose(output[0, :, head].numpy(), expected, rtol=1e-10)


def within(n_tokens, reach):
    """A causal mask with a window."""
    distance = torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
    return ((distance >= 0) & (distance < reach))[None, None]


def test_a_prompt_that_is_read_in_pieces_within_the_documents_is_refused():
    model = shaken_model("llama")
    ids, spans = prompt((0, 1, 2, 3))
    with (
        mitigated(model, "pine", passages=spans),
        torch.no_grad(),
    ):
        with pytest.raises(UsageError, match="pine: the 14 tokens of all passages must be read in one call, got 6"):
            model.network(model.token_tensor([ids[:9]]))
        plain = model.network(model.token_tensor([ids]), use_cache=True).past_key_values
        plain.crop(9 - len(ids))
        with pytest.raises(UsageError, match="pine: the 14 tokens of all passages must be read in one call, got 8"):
            model.network(model.token_tensor([ids[9:]]), past_key_values=plain)
