"""Tasks in language, with the answer at a chosen position of the context; one file each."""

from posbias.tasks.language.base import LANGUAGE_TASKS, Example, Fitted, LanguageTask, Message, fit
from posbias.tasks.language.documents import Documents
from posbias.tasks.language.encoding import Encoded, encode
from posbias.tasks.language.example_order import ExampleOrder
from posbias.tasks.language.key_value import KeyValue
from posbias.tasks.language.needle import Needle
from posbias.tasks.language.token_copy import TokenCopy

__all__ = [
    "LANGUAGE_TASKS",
    "Documents",
    "Encoded",
    "Example",
    "ExampleOrder",
    "Fitted",
    "KeyValue",
    "LanguageTask",
    "Message",
    "Needle",
    "TokenCopy",
    "encode",
    "fit",
]
