"""Answers as models write them: each form gives the right value or none, never another one."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from posbias.tasks.language import RULES

letter_in = RULES.parse("choice(options=4)").read
number_in = RULES.parse("number").read

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
# fmt: on


@pytest.mark.parametrize("form", LETTER_FORMS)
@pytest.mark.parametrize("letter", "ABCD")
def test_a_letter_is_read_in_its_usual_forms(form: str, letter: str) -> None:
    text = form.replace("D is", "E is" if letter != "D" else "D is").replace("@", letter)
    assert letter_in(text) == letter


@pytest.mark.parametrize("text", NO_LETTER)
def test_what_names_no_letter_for_certain_is_unreadable(text: str) -> None:
    assert letter_in(text) is None


def test_no_form_of_a_number_gives_another() -> None:
    read = {form: number_in(form.replace("@", "12")) for form in NUMBER_FORMS}
    assert set(read.values()) == {12, None}
    assert [form for form, value in read.items() if value is None] == NUMBER_FORMS[-10:]
    assert {text: number_in(text) for text in NUMBERS} == NUMBERS
    assert {text: number_in(text) for text in NO_NUMBER} == dict.fromkeys(NO_NUMBER)


BEFORE = st.sampled_from(
    ["", "Well. ", "The answer is ", "Answer: ", "**Answer:** ", "So ", "I doubt it: ", "Not ", "- ", "1. "]
)
AROUND = st.sampled_from(
    ["@", "**@**", "$@$", "`@`", "(@)", "[[@]]", "\\boxed{@}", "<answer>@</answer>", "#### @", '"@"']
)
BEHIND = st.sampled_from(
    ["", ".", "?", "!", ", I think", " because it says so", ", but not for certain", "\n\nHowever, so", "\nand so on"]
)


@given(before=BEFORE, around=AROUND, behind=BEHIND, line=st.sampled_from([" ", "\n", "\n\n"]), data=st.data())
def test_a_decorated_value_is_never_read_as_another(
    before: str, around: str, behind: str, line: str, data: st.DataObject
) -> None:
    """Whatever stands around it; and beside it another value, it is that value, or the other one labelled, or none."""

    def dressed(value: str) -> str:
        return before + line * around.startswith("#") + around.replace("@", value) + behind

    letter, number = data.draw(st.sampled_from("ABCD")), data.draw(st.decimals(-10_000, 10_000, places=2))
    spelled = data.draw(st.sampled_from([f"{number}", f"{number:,}", f"{number:f}".rstrip("0").rstrip(".")]))
    assert letter_in(dressed(letter)) in (letter, None)
    assert number_in(dressed(spelled)) in (float(number), None)


@given(st.text(max_size=60) | st.text("AB12[]{}<>.,:-$\\\n `*answeris", max_size=60))
@example("[[" * 30)
def test_any_text_is_read_or_not(text: str) -> None:
    for rule in ("number", "choice", "verdict"):
        judge: Any = RULES.parse(rule)
        assert judge.readable(text) == (judge.read(text) is not None)


def test_a_long_text_is_read_in_no_time() -> None:
    for part in (" ", "1 ", "the ", "\n", "A > ", "a", "*_"):
        for rule in ("number", "choice", "verdict"):
            RULES.parse(rule).readable("x" + part * (60_000 // len(part)) + "x")
