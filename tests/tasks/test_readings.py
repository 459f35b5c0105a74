"""Answers as models write them: each form gives the right value or none, never another one."""

from datetime import date
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from posbias.tasks.language.readings import NAME, day_in, json_in, number_in
from posbias.tasks.language.rules import RULES
from posbias.tasks.language.verdict_parsing import TIE, first_ranked, letter_in

# fmt: off
LETTER_FORMS = [
    "**Final Answer**\n@. Oslo", "### Answer:\n\n(@) Oslo", "**Answer**\n@ because the text says so.",
    "@", " @\n", "@.", "(@)", "@) Oslo", "@. Oslo", "**@**", "`@`", "__@__", "$@$", "\\text{@}", "- @", "@!",
    "@ — Oslo", "Answer: @", "**ANSWER: @**", "ANSWER: **@**", "**Answer:** @", "**Answer**: **@**", "ANSWER: $@$",
    "Answer - @", "Answer\n@", "Answer: (@) Oslo", "Answer: @. Oslo", "The answer is: @", "Final answer: @",
    "My answer is @.", "$\\boxed{\\textbf{@}}$", "\\[\\boxed{@}\\]", "[[@]]", "<answer>@</answer>",
    "<answer>\n@\n</answer>", "#### @", '{"answer": "@"}', '```json\n{"answer": "@"}\n```', "```\n@\n```", "答案：@",
    "Antwort: @", "Réponse : @", "The answer is @ because the text says so.", "@ because",
    "@, because D is not there", "@\n\nD is not in the text.", "@ is the correct answer.", "Option @ is correct.",
    "The correct answer is option @.", "I would go with option @", "The correct answer is **@. Oslo**.",
    "The best choice would be @.", "Therefore, the answer is (@).", "I choose @.",
    "A. Oslo\nB. Rome\nC. Paris\nD. Bonn\n\n**@**",
    "A. Oslo: not in the text.\nB. Rome: neither.\n\nThe best choice would be @.",
    "A: no.\nB: no\nC: no\nD: no\nTherefore @.", "A cannot be right, so the answer is @.",
    "@\nQuestion: Where was Ann born?\nA. Rome\nB. Oslo\nAnswer: A", "@\n\nQ: who?\nA: B", "❌ B\nAnswer: @",
]
NO_LETTER = [
    "", "None", "E", "A dog", "A dog is no fruit", "the answer is a plum", "Vitamin A", "I think so", "Because",
    "A. Oslo\nB. Rome\nC. Paris\nD. Bonn", "A. Oslo\nB. Rome", "A. Oslo\nB.", "A. Oslo\nB",
    "A. Oslo B. Rome C. Paris", "Options: A, B, C, D", "A or B", "A/B", "A & B", "A, B", "Either A or B",
    "Answer: A or B", "Answer: A, B", "Answer: A/B", "A\nB\nC\nD", "Answer: A\n\nAnswer: B", "A\n\nThe answer is B.",
    "A.\nWait, B", "A\n\nHowever, B fits better.", "[[A]] or [[B]]", "A?", "Is the answer A?", "The answer is A? No.",
    "Not A.", "It is not A.", "A is wrong.", "A: no.", "❌ A", "Wrong: A", "I doubt that the answer is A.",
    "If so, the answer is A.", "The answer isn't A.", "A is not the answer", "Eliminate A",
    "Answer options: A) Oslo\nB) Rome", "The answer is A-level work", "\\boxed{Oslo}",
    "**A**\n\nActually, that is wrong.", "A as well as B", "A. Oslo: not in the text.",
]
NUMBER_FORMS = [
    "3 boxes hold 4.\n\n**Answer:**\n@ pens",
    "@", " @\n", "@.", "**@**", "`@`", "$@$", "\\(@\\)", "= @", "3 * 4 = @", "@ pens", "@ €", "@%", "It is @, not 5.",
    "#### @", "3 * 4 = 7\n#### @", "\\boxed{@}", "$\\boxed{@ \\text{ pens}}$", "<answer>@</answer>", '{"answer": @}',
    "Answer: @", "**Answer:** @", "ANSWER: **@**", "Answer: 2 * 9 = @", "The answer is @ because 3 boxes hold 4.",
    "The answer is @. Check: 8 / 4 = 2.", "With 3 boxes of 4, the answer is @.", "@\n\n3 boxes hold 4 each.",
    "@ because 3 > 2", "#### @\n\nQuestion: Sue has 2 bags of 9 nuts. How many?\nAnswer: 2 * 9 = 18\n#### 18",
    "Ann has 3 boxes with 4 pens each, so she has @ pens.", "Step 1: 3 boxes\nStep 2: @", "@ or 8", "between @ and 8",
    "@\n\nWait, that is wrong. It should be 8.", "I do not think that it is @.", "more than @", "@ thousand", "@k",
    "@/7",
]
NUMBERS = {
    "-50": -50, "-$50": -50, "$-50": -50, "–50": -50, "−50": -50, "-\\$50": -50, "$-50$": -50, "US$50": 50, "50€": 50,
    "The answer is -$50.": -50, "minus 50": -50, "minus five": -5, "Seven.": 7, "There are seven": 7, "one": 1,
    "1,234.5 m": 1234.5, "\\boxed{1{,}234}": 1234, "1'234": 1234, "$1,234.50": 1234.5, "1e5": 100000.0, ".5": 0.5,
}
NO_NUMBER = [
    "", "often", "x12", "- 50", "($50)", "minus fifty", "twelve", "3/4", "$\\frac{3}{4}$", "1,5", "1.234.567",
    "12:30", "5 or 412", "eight, or 7", "3\n4\n12", "10-12", "10 to 12", "< 12", "at most 12", "2*10^5", "10²", "5M",
    "3 million", "\\boxed{x+1}", "\\boxed{3 + x}", "Is it 12?", "12? No.", "12 pens total: 3 boxes",
    "1. There are twelve pens", "[1] 12",
]
DAY_FORMS = [
    "{m} {d}, {y}", "{m} {d}{s}, {y}", "{d} {m} {y}", "{d}{s} of {m} {y}", "the {d}{s} of {m}, {y}", "{d} {m}, {y}",
    "{a}. {d}, {y}", "{a} {d} {y}", "{M} {d}, {y}", "{m} the {d}{s}, {y}", "{y}/{n:02}/{d:02}", "{y}-{n:02}-{d:02}",
    "It was on Tuesday, {d} {m} {y}.", "**{m} {d}, {y}**", "Answer: {d} {m} {y}. It rained on 5 May 1922.",
    "{d}.{n}.{y}", "{m} {d}, {y}\n(He died on May 1, 1990.)", "\\boxed{{\\text{{{m} {d}, {y}}}}}", "{n}/{d}/{y}",
    '{{"answer": "{d} {m} {y}"}}', "It was not found on {m} {d}, {y}.", "before {m} {d}, {y}", "3 or {d} {m} {y}",
    "{d} {m} {y} 1939", "{y} {n} {d}",
]
NO_DAY = [
    "", "1921", "March 1921", "February 30, 1921", "03/04/1921", "3/4/21", "3-4 March 1921", "25 janvier 1938",
    "May 1, 1900, then March 3, 1921", "May 1, 1900, March 3, 1921", "March 3, 1921 or May 1, 1922",
    "3 May or June 1921",
]
JSON = {
    '{"a": 1}': {"a": 1}, '```json\n{"a": 1}\n```': {"a": 1}, '{\n  "a": 1\n}': {"a": 1}, "{'a': 1}": {"a": 1},
    'Sure!\n```\n{"a": [1]}\n```\nIt is {a}.': {"a": [1]}, 'Here it is: {"a": 1}.': {"a": 1}, "null": None,
    "`473`": 473, '"Oslo"': "Oslo", '`"Oslo"`': "Oslo", '```json\n"Oslo"\n```': "Oslo", '"Oslo", "age": 3': "Oslo",
    "```\n473\n```": 473,
}
NO_JSON = [
    '{"a": 1} or {"a": 2}', "12 or 13", "12\n13", "The city is Oslo.", '{"a": ', "```json", "Oslo\n\nWait, Rome.",
]
RANKINGS = [
    "@ > 1 > 2 > 3", "@>1>2>3", "**@ > 1 > 2 > 3**", "@ > 1 = 2 > 3", "@ > 1 ≥ 2 > 3",
    "Response @ >> Response 1 > 2 > 3",
    "@ > 1 > 2 > 3\n\nExplanation: only @ is right; 1 > 3, since its city is nearer.", "@, 1, 2, 3",
    "From best to worst: @, 1, 2, 3", "@\n1\n2\n3", "- @\n- 1\n- 2\n- 3", "[[@]]", '["@", "1", "2", "3"]',
    '{"order": ["@", "1", "2", "3"]}', "\\boxed{@ > 1 > 2 > 3}",
    "At first 3 > 2 > 1 > @, but on reflection @ > 1 > 2 > 3.", "3 < 2 < 1 < @", "@ ≥ 1 > 2 > 3",
    "@ > 1 > 2 > 3\n3 > @ > 1 > 2", "3: it says Oslo\n@ > 1 > 2 > 3", "@\n1",
]
# fmt: on


@pytest.mark.parametrize("form", LETTER_FORMS)
@pytest.mark.parametrize("letter", "ABCD")
def test_a_letter_is_read_in_its_usual_forms(form: str, letter: str) -> None:
    text = form.replace("D is", "E is" if letter != "D" else "D is").replace("@", letter)
    assert letter_in(text, "ABCD") == letter


@pytest.mark.parametrize("text", NO_LETTER)
def test_what_names_no_letter_for_certain_is_unreadable(text: str) -> None:
    assert letter_in(text, "ABCD") is None


def test_no_form_of_a_number_gives_another() -> None:
    read = {form: number_in(form.replace("@", "12")) for form in NUMBER_FORMS}
    assert set(read.values()) == {12, None}
    assert [form for form, value in read.items() if value is None] == NUMBER_FORMS[-10:]
    assert {text: number_in(text) for text in NUMBERS} == NUMBERS
    assert {text: number_in(text) for text in NO_NUMBER} == dict.fromkeys(NO_NUMBER)


def written(form: str, day: date) -> str:
    suffix = "th" if 10 <= day.day % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    names = {"m": f"{day:%B}", "M": f"{day:%B}".upper(), "a": f"{day:%b}"}
    return form.format(d=day.day, s=suffix, n=day.month, y=day.year, **names)


def test_a_day_is_read_in_its_usual_forms() -> None:
    for day in (date(1938, 1, 25), date(1921, 5, 13), date(2004, 9, 30)):
        read = {form: day_in(written(form, day)) for form in DAY_FORMS}
        assert set(read.values()) == {day, None}
        assert [form for form, value in read.items() if value is None] == DAY_FORMS[-5:-1]
    assert {text: day_in(text) for text in NO_DAY} == dict.fromkeys(NO_DAY)


def test_json_is_read_in_fences_over_lines_and_in_prose() -> None:
    assert {text: json_in(text) for text in JSON} == {text: (False, value) for text, value in JSON.items()}
    assert {text: json_in(text) for text in NO_JSON} == dict.fromkeys(NO_JSON)
    assert (json_in("true"), json_in("New Oslo.")) == ((True, True), (NAME, "new oslo"))
    rule = RULES.parse("json_value")
    assert [rule.right(text, ['"Oslo"']) for text in ('"Oslo"', "oslo", '"oslo"', "The city is Oslo")] == [1, 1, 0, 0]
    assert (rule.readable("The city is Oslo"), rule.right("1", ["true"])) == (False, 0)


@pytest.mark.parametrize("best", "ABCD")
def test_a_ranking_is_read_by_its_first(best: str) -> None:
    others = [letter for letter in "DCBA" if letter != best]
    spelled = str.maketrans({"@": best, **dict(zip("123", others, strict=True))})
    read = {form: first_ranked(form.translate(spelled), "ABCD") for form in RANKINGS}
    assert set(read.values()) == {best, None}
    assert [form for form, first in read.items() if first is None] == [*RANKINGS[-5:-2], RANKINGS[-1]]
    assert first_ranked(f"{best} = {others[0]} > {others[1]}", "ABCD") == TIE


BEFORE = st.sampled_from(
    ["", "Well. ", "The answer is ", "Answer: ", "**Answer:** ", "So ", "I doubt it: ", "Not ", "- ", "1. "]
)
AROUND = st.sampled_from(
    ["@", "**@**", "$@$", "`@`", "(@)", "[[@]]", "\\boxed{@}", "<answer>@</answer>", "#### @", '"@"']
)
BEHIND = st.sampled_from(
    [
        "",
        ".",
        "?",
        "!",
        ", I think",
        " because it says so",
        ", but not for certain",
        "\n\nHowever, see below",
        "\nand so on",
    ]
)


@given(before=BEFORE, around=AROUND, behind=BEHIND, line=st.sampled_from([" ", "\n", "\n\n"]), data=st.data())
def test_a_decorated_value_is_never_read_as_another(
    before: str, around: str, behind: str, line: str, data: st.DataObject
) -> None:
    """Whatever stands around it; and beside it another value, it is that value, or the other one labelled, or none."""

    def dressed(value: str) -> str:
        return before + line * around.startswith("#") + around.replace("@", value) + behind

    letter, number = data.draw(st.sampled_from("ABCD")), data.draw(st.decimals(-10_000, 10_000, places=2))
    day = data.draw(st.dates(date(1000, 1, 1), date(2999, 12, 31)))
    spelled = data.draw(st.sampled_from([f"{number}", f"{number:,}", f"{number:f}".rstrip("0").rstrip(".")]))
    form = data.draw(st.sampled_from(DAY_FORMS[:12]))
    assert letter_in(dressed(letter), "ABCD") in (letter, None)
    assert number_in(dressed(spelled)) in (float(number), None)
    assert day_in(dressed(written(form, day))) in (day, None)
    assert first_ranked(dressed(" > ".join([letter, *sorted({*"ABCD"} - {letter})])), "ABCD") in (letter, None)


@given(st.text(max_size=60) | st.text("AB12[]{}<>.,:-$\\\n `*answeris", max_size=60))
@example("[[" * 30)
def test_any_text_is_read_or_not(text: str) -> None:
    for rule in ("number", "date", "json_value", "choice", "verdict", "first_ranked(responses=3)"):
        judge: Any = RULES.parse(rule)
        assert judge.readable(text) == (judge.read(text) is not None)


def test_a_long_text_is_read_in_no_time() -> None:
    for text in (
        " " * 50_000,
        "1 " * 20_000,
        "the " * 20_000,
        "\n" * 50_000,
        "A > " * 10_000,
        "a" * 50_000,
        "*_" * 25_000,
    ):
        for rule in ("number", "date", "json_value", "choice", "verdict", "first_ranked(responses=3)"):
            RULES.parse(rule).readable("x" + text + "x")


@pytest.mark.parametrize(
    ("rule", "answer", "right", "wrong"),
    [
        ("number", "412", ["412", " It is 412 euros, not 5", "412.0"], ["", "4120", "5 or 412", "5\n412"]),
        ("number", "7", ["7 plums", "Seven.", "There are seven"], ["17", "eight, or 7", "often"]),
        (
            "json_value",
            '"Oslo"',
            ['"Oslo"', "Oslo", '"Oslo", "age": 3'],
            ["New Oslo", '"oslo"', '{"city": "Oslo"}'],
        ),
        ("json_value", "957", ["957", "0x3bd", "957  # the letter"], ["957 apples", "print(957)", "'957'"]),
        (
            "date",
            "March 3, 1921",
            ["March 3, 1921", "on 3 March 1921.", "1921-03-03", "Mar 3, 1921", "March 3rd, 1921"],
            ["March 13, 1921", "1921", "February 30, 1921", "May 1, 1900, then March 3, 1921"],
        ),
        ("whole_words", "Nils", ["It is Nils, the cook.", "nils"], ["Nilsson", "Olga. Nils is not", "Olga\nNils"]),
        ("whole_words", "Olga", ["Olga said so"], ["the organ"]),
        ("equals", "candle", ["candle", " Candle.", '"candle"'], ["I say candle", "candles", "paper candle"]),
    ],
)
def test_rules_take_other_forms_of_an_answer_and_nothing_else(rule, answer, right, wrong):
    judge = RULES.parse(rule)
    assert [text for text in right if not judge.right(text, [answer])] == []
    assert [text for text in wrong if judge.right(text, [answer])] == []
