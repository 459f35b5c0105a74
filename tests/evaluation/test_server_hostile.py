"""Whatever a server answers: one line within the time allowed, in bounded memory, and the next answer is read."""

import threading
import time

import pytest

from evaluation.hostile import HOSTILE, LATE, Hostile, hostile_server
from posbias.errors import RunError
from posbias.evaluation.responders import Request, ServerOptions, ServerResponder

OPTIONS = ServerOptions(retries=0, first_delay=0.01, timeout=0.3, concurrency=1)
PATIENCE = 4.0
"""Far beyond the time-out (seconds), for a busy machine."""
LONGEST_LINE = 500


def test_the_table_is_as_large_as_it_says() -> None:
    names = [hostile.name for hostile in HOSTILE]
    assert len(set(names)) == len(names)
    assert len(names) >= 120


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_answer_is_one_line_and_the_next_one_is_read(hostile: Hostile) -> None:
    timeout = 0.3 if hostile.expected == LATE else 10.0
    options = ServerOptions(retries=0, first_delay=0.01, timeout=timeout, concurrency=1, kind=hostile.kind)
    before = threading.active_count()
    with hostile_server(hostile) as address:
        responder = ServerResponder(address, "m", options)
        begin = time.monotonic()
        if hostile.expected:
            with pytest.raises(RunError, match=hostile.expected) as caught:
                responder.respond([Request("q", answer=" x")], generate=hostile.kind == "chat", score=True)
            line = str(caught.value)
            assert line.isprintable()
            assert len(line) <= LONGEST_LINE
            assert "unexpected" not in line
        if hostile.expected == LATE:
            assert time.monotonic() - begin < PATIENCE
        if hostile.kind == "chat" and not hostile.tls:
            (answer,) = responder.generate([Request("another")])
            assert answer.text == "to all"
        responder.close()
    assert threading.active_count() == before
