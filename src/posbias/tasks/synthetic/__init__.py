"""Synthetic tasks for controlled training: position copy, cued copy and key-value retrieval.

A task is a frozen variant whose fields are its parameters; a stack draws the data of many members at once, each the
same bits as if it were drawn alone. What the tasks mean is in `context`; how draws are seeded in `base`. Others may be
registered from anywhere, as that of a published experiment is in `posbias_papers`.
"""

from posbias.tasks.synthetic.base import SYNTHETIC_TASKS, SyntheticTask, cross_entropy, stack_tasks
from posbias.tasks.synthetic.context import CuedCopy, KeyValueRetrieval, PositionCopy
