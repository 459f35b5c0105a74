"""Synthetic tasks for controlled training: in-context and key-value retrieval, position and cued copy,
free recall and running span, and text with key-value pairs in it.

A task is a frozen variant whose fields are its parameters; a stack draws the data of many members at once, each the
same bits as if it were drawn alone. What the tasks mean is in each module; how draws are seeded in `base`.
"""

from posbias.tasks.synthetic.asking import CuedCopy, KeyValueRetrieval
from posbias.tasks.synthetic.base import (
    IGNORED,
    SYNTHETIC_TASKS,
    SyntheticTask,
    cross_entropy,
    stack_tasks,
)
from posbias.tasks.synthetic.recall import FreeRecall, PositionCopy, RecallAndSpan, RunningSpan
from posbias.tasks.synthetic.retrieval import CONTRASTS, InContextRetrieval
from posbias.tasks.synthetic.text import TextWithPairs

__all__ = [
    "CONTRASTS",
    "IGNORED",
    "SYNTHETIC_TASKS",
    "CuedCopy",
    "FreeRecall",
    "InContextRetrieval",
    "KeyValueRetrieval",
    "PositionCopy",
    "RecallAndSpan",
    "RunningSpan",
    "SyntheticTask",
    "TextWithPairs",
    "cross_entropy",
    "stack_tasks",
]
