"""Every task in language: the paired design, exact places of the moved item, and the published wording."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import save_byte_tokenizer
from posbias import UsageError
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
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte, so that tokens are characters of these (ASCII) prompts."""
    directory = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(directory)
    found = AutoTokenizer.from_pretrained(directory)
    found.chat_template = CHAT_TEMPLATE
    return found


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
        assert example.gold_token is not None
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
        assert example.gold_position is not None
        text = str(example.prompt[0]["content"]) if chat else str(example.prompt)  # type: ignore[index]
        passages = [text[begin:end] for begin, end in example.passages]
        assert len(passages) == task.n_items
        assert example.answers[0] in passages[example.gold_position]
        assert sorted(example.passages) == list(example.passages)
        known.append(set(passages))
        places, n_tokens = locate(example.prompt, example.passages, tokenizer)
        token_ids = encode(example.prompt, tokenizer).token_ids
        assert places is not None
        assert [tokenizer.decode(token_ids[begin:end]) for begin, end in places] == passages
        assert n_tokens == len(token_ids)
        if example.gold_token is not None:
            begin, end = places[example.gold_position]
            assert example.gold_token <= begin < end == example.gold_end
    assert all(passages == known[0] for passages in known), "the same passages at every position"
    documents = "(born" if "entry" in spelling else "(Title"
    begins = {"documents": documents, "key_value": '"'}
    assert begins.get(task.name, "") in min(known[0])


def test_running_text_and_closed_books_list_no_passages(tokenizer: Any) -> None:
    for spelling in ("needle(tokens=1200, depths=2)", "documents(setting='closed_book')"):
        assert next(LANGUAGE_TASKS.parse(spelling).examples(tokenizer, count=1)).passages == ()
    assert locate("text", [(0, 2)], None) == (None, None)


def test_opening_special_tokens_count_as_tokens_of_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    save_byte_tokenizer(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    opened.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", 0)])
    task = KeyValue(pairs=3)
    for plain, shifted in zip(asked(task, tokenizer), asked(task, opened), strict=True):
        assert plain.n_tokens is not None
        assert plain.gold_token is not None
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
    assert isinstance(example.prompt, str)
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
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps({"question": "who", "answers": ["It", "that"], "ctxs": contexts}) + "\n")
    return path


def test_documents_stand_in_a_prompt_of_ones_own(published_documents: Path, tmp_path: Path) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text('Reply as {"answer": ...}.\n{question}?\n\n{documents}\n\nUser: {question}?\nReply:\n')

    def example(**arguments: Any) -> Example:
        place = [1] if "setting" not in arguments else None
        task = Documents(file=str(published_documents), documents=2, template=str(template), **arguments)
        (found,) = LANGUAGE_TASKS.parse(str(task)).examples(None, count=1, positions=place)
        return found

    around = ('Reply as {"answer": ...}.\nwho?\n\n', "\n\nUser: who?\nReply:")
    published = example()
    assert published.text == "Document [1](Title: A) first\nDocument [2](Title: G) holds it".join(around)
    own = example(entry="<doc {number}>{title}\n{text}\n</doc>")
    assert own.text == "<doc 1>A\nfirst\n</doc>\n<doc 2>G\nholds it\n</doc>".join(around)
    assert [own.text[begin:end] for begin, end in own.passages] == ["A\nfirst\n</doc>", "G\nholds it\n</doc>"]
    assert example(entry="{text}").text == "first\nholds it".join(around)
    assert example(setting="closed_book").text == "".join(around)


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
    ending: str, prompt_ends: str, target: str, published_documents: Path, tmp_path: Path
) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text("{documents}\n\n{question}?\n" + ending)
    task = Documents(file=str(published_documents), documents=2, template=str(template))
    (found,) = task.examples(None, count=1, positions=[1])
    assert found.text.endswith(prompt_ends)
    assert found.target == target
    assert found.moved_blanks == len(ending) - len(ending.rstrip(" \t"))
    chat = Documents(file=str(published_documents), documents=2, template=str(template), chat=True)
    assert next(chat.examples(None, count=1)).target == "It"


def test_blanks_within_the_last_passage_stay_there(published_documents: Path, tmp_path: Path) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text("{question}?\n{documents} ")
    task = Documents(file=str(published_documents), documents=2, template=str(template), entry="{text}")
    (found,) = task.examples(None, count=1, positions=[1])
    assert found.text.endswith("holds it")
    assert found.text[slice(*found.passages[1])] == "holds it"


@pytest.mark.parametrize("text", ["{documents}", "{question}", "{documents}{documents}{question}", ""])
def test_a_prompt_without_its_documents_or_its_question_is_refused(text: str, tmp_path: Path) -> None:
    template = tmp_path / "prompt.txt"
    template.write_text(text)
    with pytest.raises(UsageError, match=r"prompt.txt' must hold \{documents\} once and \{question\} at least once"):
        next(Documents(template=str(template)).examples(None, count=1))


def test_what_stands_in_a_document_is_no_part_of_the_prompts_form(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    documents = [{"title": "{text} {number}", "text": "{title}", "is_gold": True}]
    file.write_text(json.dumps({"question": "{documents}", "answers": ["title"], "documents": documents}) + "\n")
    template = tmp_path / "prompt.txt"
    template.write_text("{documents} {question}")
    task = Documents(file=str(file), documents=1, template=str(template), entry="{number} {title} {text}")
    assert next(task.examples(None, count=1)).text == "1 {text} {number} {title} {documents}"


def test_documents_tell_their_condition(tokenizer: Any) -> None:
    (closed,) = Documents(setting="closed_book").examples(tokenizer, count=1)
    assert (closed.gold_position, closed.gold_token, closed.condition) == (None, None, "closed_book")
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
        assert begins[0] is not None
        assert begins[-1] is not None
        span = begins[-1] - begins[0]
        assert all(example.n_tokens is not None and 0.98 * 4000 < example.n_tokens <= 4000 for example in examples)
        for place, begin in enumerate(begins):
            assert begin is not None
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
    with pytest.raises(UsageError, match=r"own\.txt has too little text"):
        asked(Needle(tokens=9000, depths=3, corpus=str(path)), tokenizer, count=1)
    with pytest.raises(UsageError, match="No such file"):
        asked(Needle(corpus=str(tmp_path / "none.txt")), tokenizer, count=1)


def test_words_are_all_different() -> None:
    assert len(set(CITIES)) == len(CITIES)
    # One within another would count as it.
    assert not [(one, other) for one in CITIES for other in CITIES if one != other and one in other]


def test_chat_needs_a_template_that_keeps_the_message(tokenizer: Any, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    bare = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
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
    with pytest.raises(UsageError, match="changes the text of the message"):
        list(KeyValue(pairs=3, chat=True).examples(bare, count=1))
    assert next(KeyValue(pairs=3, chat=True).examples(None, count=1)).gold_token is None


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
        (
            "documents(entry='[{number}] {title}')",
            "entry must hold, in this order, {text} or {number} {text} or {title}",
        ),
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
        (
            "ruler()",
            "unknown task 'ruler'; known: documents, items,",
        ),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(spelling: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        LANGUAGE_TASKS.parse(spelling)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(UsageError) as caught:
        KeyValue(pairs=3).examples(None, **arguments)
    assert complaint in str(caught.value)


def test_needle_without_tokenizer_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="needs the model's \\(fast\\) tokenizer"):
        Needle().examples(None, count=1)


def test_too_many_depths_for_the_text_are_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="do not have 11 different depths"):
        asked(Needle(tokens=300, depths=11), tokenizer, count=1)
    with pytest.raises(UsageError, match="tokens=64 leaves no room"):
        asked(Needle(tokens=64), tokenizer, count=1)
