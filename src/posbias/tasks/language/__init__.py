"""Tasks in language, with the answer at a chosen position of the context."""

from posbias.prompts.tokens import Span, encode, locate
from posbias.tasks.language.adherence import RulesAtTurns
from posbias.tasks.language.among import TaskAmong
from posbias.tasks.language.base import LANGUAGE_TASKS, Example, LanguageTask, file_sha256
from posbias.tasks.language.documents import Documents, KeyValue
from posbias.tasks.language.items import Items
from posbias.tasks.language.mrcr import Mrcr
from posbias.tasks.language.needle import Needle
from posbias.tasks.language.pairwise import Pairwise
from posbias.tasks.language.rules import RULES
