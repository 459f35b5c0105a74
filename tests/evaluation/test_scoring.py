"""The published scoring rules on examples worked by hand."""

import pytest

from posbias import UsageError
from posbias.evaluation.responders.base import told_apart
from posbias.tasks.language import RULES
from posbias.tasks.language.rules import normalise_answer


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("Theatre of another area", "theatre of another area"),  # articles only as whole words
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation goes first, so the article is no longer a word
        ("  \t\n ", ""),
        ("Röntgen's “rays”", "röntgens “rays”"),  # only ASCII punctuation
    ],
)
def test_normalisation_by_hand(text: str, bare: str) -> None:
    assert normalise_answer(text) == bare
    assert normalise_answer(bare) == bare, "nothing is left to normalise"


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("It was Wilhelm Conrad Röntgen, in 1901.", ["Wilhelm Conrad Röntgen"], 1.0),
        ("wilhelm  conrad\tröntgen", ["The Wilhelm-Conrad Röntgen"], 0.0),  # the hyphen joins the words of the answer
        ("THE BEATLES", ["Beatles", "Stones"], 1.0),
        ("beat the less", ["Beatles"], 0.0),
        ("beat-les", ["Beatles"], 1.0),
        ("in 19014", ["1901"], 1.0),  # a span of characters, not of words
        ("I do not know\nParis", ["Paris"], 0.0),  # only the first line counts
        ("\nParis", ["Paris"], 1.0),  # that is not blank
        ("\n \r\n Rome\nParis", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("Tower of London", ["Tower of the London"], 1.0),
    ],
)
def test_best_subspan_by_hand(prediction: str, answers: list[str], score: float) -> None:
    assert RULES.parse("best_subspan_em").right(prediction, answers) == score


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        (' "6F-ab"', ["6f-AB"], 1.0),
        ("first\nthen 6f-ab", ["6f-ab"], 1.0),  # anywhere, other lines too
        ("6fab", ["6f-ab"], 0.0),  # punctuation counts
        ("6f- ab", ["6f-ab"], 0.0),
        ("", ["x"], 0.0),
        ("y", ["x", "y"], 1.0),
    ],
)
def test_contains_by_hand(prediction: str, answers: list[str], score: float) -> None:
    assert RULES.parse("contains").right(prediction, answers) == score


def test_rules_are_found_by_name() -> None:
    with pytest.raises(UsageError, match="unknown rule 'f1'; known: best_subspan_em, call, choice, contains, equals"):
        RULES.parse("f1")


def test_answers_that_would_always_be_right_are_refused() -> None:
    with pytest.raises(UsageError, match="holds nothing but articles"):
        RULES.parse("best_subspan_em").right("anything", ["The"])
    for answers in ([], [""]):
        with pytest.raises(UsageError, match="at least 1 text, none empty"):
            RULES.parse("contains").right("anything", answers)


@pytest.mark.parametrize("text", ["```\nTown\n```", "\n```text\nTown", "Town\n```", "```\nTown"])
@pytest.mark.parametrize("rule", ["equals", "whole_words", "best_subspan_em"])
def test_a_fence_is_no_line_of_an_answer(rule: str, text: str) -> None:
    assert RULES.parse(rule).right(text, ["Town"]) == 1
    assert told_apart(text).cut(("\n",)).answer.strip().endswith("Town")
