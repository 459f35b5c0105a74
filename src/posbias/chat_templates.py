"""Which chat templates can be used, and what they are told beside the messages, such as `enable_thinking=False`.

The options are kept by the tokenizer, so that every conversation it renders is rendered alike: to be measured,
answered, scored or fitted to.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from posbias.errors import UsageError

TEMPLATE_OPTIONS = "posbias_template_options"
"""Attribute of a tokenizer that holds what its chat template is told beside the messages."""
OWN_OF_RENDERING = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self"),
    )
)
"""Arguments of rendering that are no options of a template."""


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot render conversations, and a model without any."""
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, so it cannot render a conversation; give token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "the model's tokenizer has no chat template (a base model?); write the prompts as text, or set "
            "tokenizer.chat_template"
        )


def with_template_options(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """A copy of a tokenizer whose chat template is told some options, such as `{"enable_thinking": False}`.

    Raises:
        UsageError: no chat template, or one that does not hold the name of an option, which would do nothing.
    """
    if not options:
        return tokenizer
    check_template_options(options)
    check_template(tokenizer)
    template = tokenizer.chat_template
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    for name in options:
        if not re.search(rf"\b{name}\b", text):
            raise UsageError(f"template option {name!r} does nothing: the model's chat template does not name it")
    told = copy.copy(tokenizer)
    setattr(told, TEMPLATE_OPTIONS, dict(options))
    return told


def check_template_options(options: object) -> None:
    """Refuse what are no options of a chat template by name, with values that JSON can say."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in options):
        raise UsageError(f"template options must be values by name, such as enable_thinking=False, got {options!r:.80}")
    for name in options:
        if name in OWN_OF_RENDERING:
            raise UsageError(f"template option {name!r} is set where conversations are rendered; allowed: others")
    try:
        json.dumps(dict(options), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"template options must be what JSON can say: {error}") from None


def template_options_of(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer's chat template is told beside the messages."""
    return dict(getattr(tokenizer, TEMPLATE_OPTIONS, {}))
