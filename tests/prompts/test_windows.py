"""Windows as theorems: inside documents, distinct, disjoint while there is room, prefixes of one another."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posbias.prompts import loading
from posbias.prompts.loading import WindowDrawer, take_turns
from posbias.prompts.sources import Group

NO_TEXT = SimpleNamespace(tokenizer=None, vocabulary_size=10**9, max_positions=None)
document_lengths = st.lists(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=4
)


def numbered(lengths):
    """Groups of segments of documents whose token ids are all different, so that a window shows where it was cut."""
    groups, documents, first = [], [], 0
    for number, segments in enumerate(lengths):
        parts = []
        for segment in segments:
            part = []
            for length in segment:
                part.append(np.arange(first, first + length, dtype=np.int64))
                first += length
            documents += part
            parts.append(part)
        groups.append(Group(str(number), parts))
    return groups, documents


def drawer(groups, length, seed):
    return WindowDrawer(groups, NO_TEXT, length, seed)


@given(document_lengths, st.integers(1, 12), st.integers(0, 5))
def test_every_window_of_every_document_comes_exactly_once(lengths, length, seed):
    groups, documents = numbered(lengths)
    windows = [tuple(window) for window in drawer(groups, length, seed).draw()]
    expected = {tuple(text[k : k + length]) for text in documents for k in range(len(text) - length + 1)}
    assert len(windows) == len(set(windows))
    assert set(windows) == expected


@given(document_lengths, st.integers(1, 12), st.integers(0, 5))
def test_windows_are_disjoint_while_there_is_room(lengths, length, seed):
    groups, documents = numbered(lengths)
    room = sum(len(text) // length for text in documents)
    first = [token for window in islice(drawer(groups, length, seed).draw(), room) for token in window]
    assert len(first) == len(set(first)) == room * length


@given(document_lengths, st.integers(1, 12), st.integers(0, 5), st.integers(0, 20))
def test_a_smaller_count_is_a_prefix_of_a_larger_one(lengths, length, seed, count):
    groups, _ = numbered(lengths)
    many = np.array(list(islice(drawer(groups, length, seed).draw(), 2 * count)))
    few = np.array(list(islice(drawer(groups, length, seed).draw(), count)))
    np.testing.assert_array_equal(few, many[: len(few)])


def test_groups_and_documents_take_turns():
    groups, documents = numbered([[[30, 30], [30, 30]], [[90]], [[30, 30, 30]]])
    windows = list(islice(drawer(groups, 5, seed=3).draw(), 12))
    owner = np.repeat(np.arange(len(documents)), [len(text) for text in documents])
    group_of = np.array([0, 0, 0, 0, 1, 2, 2, 2])
    drawn = [int(owner[window[0]]) for window in windows]
    assert all(sorted(group_of[drawn[k : k + 3]]) == [0, 1, 2] for k in (0, 3, 6, 9))
    assert {d for d in drawn if group_of[d] == 0} == {0, 1, 2, 3}
    assert {d for d in drawn if group_of[d] == 2} == {5, 6, 7}


def test_equal_windows_are_drawn_once():
    groups = [Group("same", [[np.zeros(50, dtype=np.int64)]])]
    assert len(list(drawer(groups, 5, seed=0).draw())) == 1


def test_only_the_segments_needed_are_read(monkeypatch):
    groups, _ = numbered([[[100]] * 500])
    tried, read = drawer(groups, 10, seed=0), []
    monkeypatch.setattr(loading, "check_vocabulary", lambda token_ids, *_: read.append(token_ids))
    assert len(list(islice(tried.draw(), 6))) == len(read) == 6


@given(st.lists(st.lists(st.integers(), max_size=5), max_size=6), st.none() | st.integers(1, 4))
def test_turns_lose_and_repeat_nothing(rows, limit):
    assert sorted(take_turns(map(iter, rows), limit)) == sorted(item for row in rows for item in row)
