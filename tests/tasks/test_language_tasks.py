"""Every task in language: the paired design, exact places of the moved item, and the published wording."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from conftest import json_lines, refused
from posbias.tasks.language import (
    LANGUAGE_TASKS,
    Documents,
    Example,
    KeyValue,
    LanguageTask,
    Needle,
    encode,
    locate,
)
from posbias.tasks.language.documents import CITIES

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</>\n{% endfor %}<assistant>\n"
SPELLINGS = (
    "key_value(pairs=5)",
    "key_value(pairs=5, query='both')",
    "documents(documents=4)",
    "documents(documents=4, query='before')",
    "documents(documents=4, entry='<doc id={number}>{title}: {text}</doc>')",
    "needle(tokens=1200, depths=5)",
)


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return byte_tokenizer(CHAT_TEMPLATE)


def asked(task: LanguageTask, tokenizer: Any, count: int = 2, **arguments: Any) -> list[Example]:
    # Words of more than one byte are never one token of the byte tokenizer.
    return list(task.examples(tokenizer, count=count, **arguments))


def item_of(example: Example, tokenizer: Any) -> str:
    token_ids = encode(example.prompt, tokenizer).token_ids
    return str(tokenizer.decode(token_ids[example.gold_token : example.gold_end]))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_samples_are_paired_and_only_the_item_moves(spelling: str, tokenizer: Any) -> None:
    task = LANGUAGE_TASKS.parse(spelling)
    groups = defaultdict(list)
    for example in asked(task, tokenizer):
        groups[example.sample].append(example)
    assert len(groups) == 2
    for examples in groups.values():
        assert [example.gold_position for example in examples] == list(range(task.n_items))
        assert len({example.answers for example in examples}) == 1
        assert len({example.prompt for example in examples}) == task.n_items
        told = {"".join(sorted(str(example.prompt))) for example in examples}
        assert len(told) == 1, "the same characters at every position"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("chat", [False, True])
def test_gold_tokens_are_exactly_the_item(spelling: str, chat: bool, tokenizer: Any) -> None:
    closing = spelling.replace(")", ", chat=True)") if chat else spelling
    places = []
    for example in asked(LANGUAGE_TASKS.parse(closing), tokenizer, count=1):
        assert isinstance(example.prompt, str) is not chat
        text = encode(example.prompt, tokenizer).text
        assert item_of(example, tokenizer) == text[example.gold_token : example.gold_end]
        assert example.answers[0] in item_of(example, tokenizer)
        assert example.n_tokens == len(text)
        assert example.target == (example.answers[0] if chat else f" {example.answers[0]}")
        places.append(example.gold_token)
    assert places == sorted(set(places))


@pytest.mark.parametrize("spelling", [text for text in SPELLINGS if "needle" not in text])
@pytest.mark.parametrize("chat", [False, True])
def test_passages_are_the_items_without_their_numbers(spelling: str, chat: bool, tokenizer: Any) -> None:
    task = LANGUAGE_TASKS.parse(spelling.replace(")", ", chat=True)") if chat else spelling)
    known: list[set[str]] = []
    for example in asked(task, tokenizer, count=1):
        text = str(example.prompt[0]["content"]) if chat else str(example.prompt)
        passages = [text[begin:end] for begin, end in example.passages]
        assert len(passages) == task.n_items
        assert example.answers[0] in passages[example.gold_position]
        assert sorted(example.passages) == list(example.passages)
        known.append(set(passages))
        places, n_tokens = locate(example.prompt, example.passages, tokenizer)
        token_ids = encode(example.prompt, tokenizer).token_ids
        assert [tokenizer.decode(token_ids[begin:end]) for begin, end in places] == passages
        assert n_tokens == len(token_ids)
        if example.gold_token is not None:
            begin, end = places[example.gold_position]
            assert example.gold_token <= begin < end == example.gold_end
    assert all(passages == known[0] for passages in known), "the same passages at every position"
    documents = "(born" if "entry" in spelling else "(Title"
    begins = {"documents": documents, "key_value": '"'}
    assert begins.get(task.name, "") in min(known[0])


def test_opening_special_tokens_count_as_tokens_of_the_prompt(tokenizer: Any, byte_tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    opened = byte_tokenizer()
    opened.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    task = KeyValue(pairs=3)
    for plain, shifted in zip(asked(task, tokenizer), asked(task, opened), strict=True):
        assert (shifted.n_tokens, shifted.gold_token) == (plain.n_tokens + 1, plain.gold_token + 1)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_is_inverse_and_examples_repeat(spelling: str, tokenizer: Any) -> None:
    task = LANGUAGE_TASKS.parse(spelling)
    assert LANGUAGE_TASKS.parse(str(task)) == task
    first = asked(task, tokenizer, count=2, seed=3)
    assert first == asked(task, tokenizer, count=2, seed=3)
    assert first[: task.n_items] == asked(task, tokenizer, count=1, seed=3), "the first of 2 is the 1"
    assert first != asked(task, tokenizer, count=2, seed=4)
    some = asked(task, tokenizer, count=2, positions=[0, task.n_items - 1], seed=3)
    assert some == [example for example in first if example.gold_position in (0, task.n_items - 1)]


def test_key_value_prompt_is_the_published_one() -> None:
    (example,) = KeyValue(pairs=3).examples(None, count=1, positions=[1])
    head = 'Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"'
    assert example.prompt.startswith(head)
    data = example.prompt[example.prompt.index("{") : example.prompt.index("}") + 1]
    pairs = list(json.loads(data).items())
    assert len(pairs) == 3
    assert data == "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs) + "}"
    assert example.prompt.endswith(f'}}\n\nKey: "{pairs[1][0]}"\nCorresponding value:')
    assert example.answers == (pairs[1][1],)
    (both,) = KeyValue(pairs=3, query="both").examples(None, count=1, positions=[1])
    key = f'Key: "{pairs[1][0]}"'
    assert both.prompt == example.prompt.replace("JSON data:", f"{key}\n\nJSON data:")
    (before,) = KeyValue(pairs=3, query="before").examples(None, count=1, positions=[1])
    assert before.prompt == str(both.prompt).replace(f"{key}\nCorresponding", "Corresponding")


def test_document_prompts_are_the_published_ones(published_documents: Path) -> None:
    told = "Write a high-quality answer for the given question using only the provided search results "
    told += "(some of which might be irrelevant)."
    listed = "Document [1](Title: A) first\nDocument [2](Title: G) holds it\nDocument [3](Title: B) second"
    question = "Question: who\nAnswer:"

    def prompt(**arguments: Any) -> Any:
        place = [1] if "setting" not in arguments else None
        task = Documents(file=str(published_documents), documents=3, **arguments)
        (example,) = task.examples(None, count=1, positions=place)
        return example.prompt

    assert prompt() == f"{told}\n\n{listed}\n\n{question}"
    assert prompt(query="both") == f"{told}\n\nQuestion: who\n\n{listed}\n\n{question}"
    assert prompt(query="before") == f"{told}\n\nQuestion: who\n\n{listed}\n\nAnswer:"
    assert prompt(setting="closed_book") == question
    assert prompt(setting="oracle") == f"{told}\n\nDocument [1](Title: G) holds it\n\n{question}"


@pytest.fixture
def published_documents(tmp_path: Path) -> Path:
    """A line as published, with its gold document first and a distractor to spare."""
    titles = [("G", "holds it", True), ("A", "first", False), ("B", "second", False), ("C", "third", False)]
    contexts = [{"title": title, "text": text, "isgold": gold, "id": "1"} for title, text, gold in titles]
    return Path(json_lines(tmp_path / "qa.jsonl", {"question": "who", "answers": ["It", "that"], "ctxs": contexts}))


@pytest.fixture
def templated(published_documents: Path, tmp_path: Path) -> Any:
    """Makes the example of two documents in a prompt of one's own, the right one in the second place."""

    def example(text: str, *, file: Path = published_documents, **arguments: Any) -> Example:
        (tmp_path / "prompt.txt").write_text(text)
        task = Documents(file=str(file), template=str(tmp_path / "prompt.txt"), **{"documents": 2, **arguments})
        place = [task.n_items - 1] if "setting" not in arguments else None
        (found,) = LANGUAGE_TASKS.parse(str(task)).examples(None, count=1, positions=place)
        return found

    return example


def test_documents_stand_in_a_prompt_of_ones_own(templated: Any) -> None:
    template = 'Reply as {"answer": ...}.\n{question}?\n\n{documents}\n\nUser: {question}?\nReply:\n'
    around = ('Reply as {"answer": ...}.\nwho?\n\n', "\n\nUser: who?\nReply:")
    published = templated(template)
    assert published.text == "Document [1](Title: A) first\nDocument [2](Title: G) holds it".join(around)
    own = templated(template, entry="<doc {number}>{title}\n{text}\n</doc>")
    assert own.text == "<doc 1>A\nfirst\n</doc>\n<doc 2>G\nholds it\n</doc>".join(around)
    assert [own.text[begin:end] for begin, end in own.passages] == ["A\nfirst\n</doc>", "G\nholds it\n</doc>"]
    assert templated(template, entry="{text}").text == "first\nholds it".join(around)
    assert templated(template, setting="closed_book").text == "".join(around)
    within = templated("{question}?\n{documents} ", entry="{text}")
    assert within.text.endswith("holds it")
    assert within.text[slice(*within.passages[1])] == "holds it", "blanks within the last passage stay there"


@pytest.mark.parametrize(
    ("ending", "prompt_ends", "target"),
    [
        ("A:", "?\nA:", " It"),
        ("A: ", "?\nA:", " It"),
        ("A:\t ", "?\nA:", "\t It"),
        ("A:\n\n", "?\nA:\n", "It"),  # an editor's last line end is none of the prompt's
        ("A:\n ", "?\nA:\n", " It"),
        ("A: {question} ", "?\nA: who", " It"),
    ],
)
def test_the_answer_begins_with_the_blanks_that_end_a_template(
    ending: str, prompt_ends: str, target: str, templated: Any
) -> None:
    found = templated("{documents}\n\n{question}?\n" + ending)
    assert found.text.endswith(prompt_ends)
    assert found.target == target
    assert found.moved_blanks == len(ending) - len(ending.rstrip(" \t"))
    assert templated("{documents}\n\n{question}?\n" + ending, chat=True).target == "It"


@pytest.mark.parametrize("text", ["{documents}", "{question}", "{documents}{documents}{question}", ""])
def test_a_prompt_without_its_documents_or_its_question_is_refused(text: str, templated: Any) -> None:
    with refused("prompt.txt' must hold {documents} once and {question} at least once"):
        templated(text)


def test_what_stands_in_a_document_is_no_part_of_the_prompts_form(templated: Any, tmp_path: Path) -> None:
    documents = [{"title": "{text} {number}", "text": "{title}", "is_gold": True}]
    line = {"question": "{documents}", "answers": ["title"], "documents": documents}
    own = {"file": json_lines(tmp_path / "own.jsonl", line), "documents": 1, "entry": "{number} {title} {text}"}
    assert templated("{documents} {question}", **own).text == "1 {text} {number} {title} {documents}"


def test_documents_tell_their_condition(tokenizer: Any) -> None:
    (closed,) = Documents(setting="closed_book").examples(tokenizer, count=1)
    assert (closed.gold_position, closed.gold_token, closed.condition) == (None, None, "closed_book")
    assert closed.passages == ()
    (oracle,) = Documents(setting="oracle").examples(tokenizer, count=1)
    assert (oracle.gold_position, oracle.condition) == (0, "oracle")
    gold = next(Documents().examples(tokenizer, count=1))
    assert gold.condition == "gold"
    assert gold.answers == oracle.answers == closed.answers, "the same question in every setting"


def test_generated_distractors_never_hold_the_answer() -> None:
    for example in Documents(documents=40).examples(None, count=5, positions=[20]):
        assert str(example.prompt).count(example.answers[0]) == 1


def test_needles_stand_at_their_depths_in_tokens(tokenizer: Any) -> None:
    task = Needle(tokens=4000, depths=5)
    for sample in range(2):
        examples = asked(task, tokenizer, count=2)[5 * sample : 5 * sample + 5]
        begins = [example.gold_token for example in examples]
        span = begins[-1] - begins[0]
        assert all(0.98 * 4000 < example.n_tokens <= 4000 for example in examples)
        for place, begin in enumerate(begins):
            assert abs((begin - begins[0]) / span - place / 4) < 0.1, "within a clause of the depth asked"


def test_needle_reads_a_corpus_and_a_needle_of_ones_own(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Zebras sleep standing up. " * 200)
    own = {"needle": "Ann eats zebras.", "question": "What does Ann eat?", "answer": "zebras"}
    example = asked(Needle(tokens=600, depths=3, corpus=str(path), **own), tokenizer, count=1)[1]
    assert str(example.prompt).count("Zebras sleep standing up.") > 10
    assert " up. Ann eats zebras. Zebras " in str(example.prompt)
    assert str(example.prompt).endswith("\n\nQuestion: What does Ann eat?\nAnswer:")
    assert (example.target, example.notices) == (" zebras", ("answer_elsewhere",)), "of any case, as the rule has it"
    assert example.passages == (), "running text has none"
    with refused("own.txt has too little text"):
        asked(Needle(tokens=9000, depths=3, corpus=str(path)), tokenizer, count=1)
    with refused("No such file"):
        asked(Needle(corpus=str(tmp_path / "none.txt")), tokenizer, count=1)
    with refused("needs the model's (fast) tokenizer"):
        Needle().examples(None, count=1)
    with refused("do not have 11 different depths"):
        asked(Needle(tokens=300, depths=11), tokenizer, count=1)
    with refused("tokens=64 leaves no room"):
        asked(Needle(tokens=64), tokenizer, count=1)


def test_words_are_all_different() -> None:
    assert len(set(CITIES)) == len(CITIES)
    # One within another would count as it.
    assert not [(one, other) for one in CITIES for other in CITIES if one != other and one in other]


def test_chat_needs_a_template_that_keeps_the_message(byte_tokenizer: Any) -> None:
    bare = byte_tokenizer()
    with refused("no chat template"):
        list(KeyValue(pairs=3, chat=True).examples(bare, count=1))
    bare.chat_template = "<u>{{ messages[0].content | trim }}</u>"
    text = " \n one two \n"
    (span,), _ = locate(({"role": "user", "content": text},), [(text.index("two"), text.index("two") + 3)], bare)
    assert bare.decode(bare(f"<u>{text.strip()}</u>")["input_ids"][slice(*span)]) == "two"
    for template, whole in (("{{ messages[0].content | trim }}", "one two"), ("{{ messages[0].content }}", text)):
        bare.chat_template = f"<u>{template}</u>"
        (span,), _ = locate(({"role": "user", "content": text},), [(0, len(text))], bare)
        read = bare.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        assert bare.decode(bare(read)["input_ids"][slice(*span)]) == whole, "blanks that are kept, and none of others"
    bare.chat_template = "{{ messages[0].content | upper }}"
    with refused("changes the text of the message"):
        list(KeyValue(pairs=3, chat=True).examples(bare, count=1))
    assert next(KeyValue(pairs=3, chat=True).examples(None, count=1)).gold_token is None
    assert locate("text", [(0, 2)], None) == (None, None)


@pytest.mark.parametrize(
    ("spelling", "complaint"),
    [
        ("key_value(pairs=1)", "pairs must be a whole number >= 2"),
        ("key_value(pairs=True)", "got True"),
        ("key_value(query='never')", "query must be one of after, before, both, got 'never'"),
        ("key_value(75, 'after', 1)", "task key_value: too many positional arguments; parameters of key_value"),
        ("key_value(file='x')", "task key_value: file left posbias after 0.1.0: pairs are drawn as the published ones"),
        ("documents(shape=1)", "task documents: got an unexpected keyword argument 'shape'; parameters of documents"),
        ("documents(3, documents=3)", "task documents: multiple values for argument 'documents'; parameters"),
        ("documents(file=a b/c-d.jsonl, documents=2)", "such as name(number=1.5, flag=True, file='own.jsonl')"),
        ("documents(documents=41)", "at most 40 documents, got 41"),
        ("documents(setting='open')", "setting must be one of gold, oracle, closed_book"),
        ("documents(file='')", "file must be a text that is not empty or None, got ''"),
        ("documents(template='')", "template must be a text that is not empty or None, got ''"),
        ("documents(template='p.txt', query='both')", "query is for the published prompt"),
        ("documents(entry='[{number}] {title}')", "must hold, in this order, {text} or {number} {text} or {title}"),
        ("documents(entry='{title} {number} {text}')", "entry must hold, in this order, {text} or"),
        ("needle(tokens=10)", "tokens must be a whole number >= 64"),
        ("pairwise(pattern='x')", "task pairwise: pattern left posbias after 0.1.0: answer_pattern"),
        ("items(file='x', repeats=2)", "task items: repeats left posbias after 0.1.0: write the record again"),
        ("needle(needles=2)", "task needle: needles left posbias after 0.1.0: one needle is asked for"),
        ("needle(literal=False)", "task needle: literal left posbias after 0.1.0: items(file=...), with facts and"),
        ("needle(alike='name')", "task needle: got an unexpected keyword argument 'alike'; parameters of needle"),
        ("needle(distractors=4)", "task needle: distractors left posbias after 0.1.0: items(file=...) with the"),
        ("needle(depths=1)", "depths must be a whole number >= 2"),
        ("needle(needle='Tom is in Rome.')", "needle, question and answer go together; give all three, or none"),
        ("needle(needle='Tom', question='Who?', answer='Ann')", "the needle must hold the answer 'Ann': 'Tom'"),
        ("ruler()", "unknown task 'ruler'; known: documents, items,"),
        ("items()", "missing a required argument: 'file'"),
        ("items(file='x', rule='has')", "unknown rule 'has'; known: best_subspan_em, call, choice, contains, equals"),
        ("items(file='x', rule='number(tolerance=-1)')", "tolerance must be a finite number >= 0, got -1"),
        ("items(file='x', rule='python(function=\"os.system\")')", "must be module:function or file.py:function"),
        ("items(file='x', entry='{number}')", "must hold, in this order, {text} or {number} {text} or {letter}"),
        ("items(file='x', entry='{text} {number}')", "entry must hold, in this order, {text} or"),
        ("items(file='x', among='all')", "among must be one of alike, "),
        ("items(file='x', among='tools', fillers='y')", "among='tools' takes no fillers"),
        ("items(file='x', filled=2)", "prompts are made longer by a file of further units"),
        ("items(file='x', depths=1)", "depths must be a whole number >= 2"),
        ("pairwise(rubric='brevity')", "rubric left posbias after 0.1.0: criteria stand in a prompt of one's own"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(spelling: str, complaint: str) -> None:
    with refused(complaint):
        LANGUAGE_TASKS.parse(spelling)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"count": 0}, "count must be a whole number >= 1"),
        ({"count": 1, "seed": -1}, "seed must be a whole number >= 0"),
        ({"count": 1, "positions": []}, "positions must be whole numbers 0 ... 2, got none"),
        ({"count": 1, "positions": [0, 3]}, "got 3"),
        ({"count": 1, "positions": [-1]}, "got -1"),
        ({"count": 1, "positions": [1, 1]}, "each position once, got [1, 1]"),
    ],
)
def test_wrong_requests_are_refused_at_once(arguments: dict[str, Any], complaint: str) -> None:
    with refused(complaint):
        KeyValue(pairs=3).examples(None, **arguments)
