"""A method at work: on a loaded model, on a user's own network, or on a responder that answers requests."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from posbias.checks import checked
from posbias.errors import UsageError, printable
from posbias.evaluation.responders import LocalResponder, Responder
from posbias.evaluation.responders.base import Reply, Request
from posbias.evaluation.responders.encoding import encode_requests
from posbias.interventions.base import cache_of, hooked, named_arguments
from posbias.mitigation.methods.base import (
    MITIGATIONS,
    Method,
    Mitigation,
    Places,
    PromptMitigation,
    Spans,
    Under,
    check_one_list,
    check_spans,
)
from posbias.mitigation.methods.recipe import difference, is_recipe, read_recipe
from posbias.models.hugging_face import INTERVENTION_MARK, HuggingFaceModel
from posbias.models.loading import model_in_hand
from posbias.prompts.tokens import locate

INSTALLED = "_posbias_installed"
"""Attribute of a network that holds what was installed on it."""


@checked
class mitigated(AbstractContextManager[Any]):  # noqa: N801 (used as a function)
    """Context in which a method against position bias acts on a model; after `install` it acts until `remove`.

    No weight is touched; afterwards every logit is bit for bit what it was.

    Args:
        model: What `load_model` returns, or a causal language model of transformers.
        method: An object, its literal spelling (`"temperature(scale=0.2)"`), or the path of a recipe (.json).
        strength: 0 (the model as it is) ... 1; None: as the method says.
        passages: The prompt's passages, for methods that need them: token spans, or their texts, in order. One list
            serves all prompts of a batch. A method that acts from the question on acts behind the last one.
        prompt: The prompt that contains these texts, as the tokenizer receives it.
        tokenizer: The tokenizer of a model of transformers.

    Raises:
        UsageError: an unknown method or a recipe of another model; passages that are not in the prompt; on entry, a
            method that the model does not allow, or a second one on the same network.
    """

    def __init__(
        self,
        model: Any,
        method: Method | str,
        strength: float | None = None,
        *,
        passages: Spans | Sequence[str] = (),
        prompt: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._given = model
        self._model = model if isinstance(model, HuggingFaceModel) else _loaded(model, tokenizer)
        resolved = resolve_method(method, self._model, strength=strength)
        if not isinstance(resolved, Mitigation):
            raise UsageError(
                f"{resolved.name} changes prompts, not the model; allowed here: "
                + ", ".join(name for name in MITIGATIONS if issubclass(MITIGATIONS[name], Mitigation))
            )
        self._method, self._open = resolved, ExitStack()
        self.places: Places = _spans(passages, prompt, self._model.tokenizer)

    def __repr__(self) -> str:
        return printable(f"mitigated({self._method} on {self._model.identity['source']})")

    def __enter__(self) -> Any:
        model, method, places = self._model, self._method, self.places
        if model.intervention is not None:
            raise UsageError(
                f"{method.name}: the model is already under {model.intervention}; one at a time is allowed"
            )
        method.check(model, places)
        if method.strength == 0:
            return self._given
        known: Any = places if callable(places) else check_spans(method.name, places)

        def refuse(network: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            # `generate` compiles a network that has a cache of fixed size, and a graph may miss the hooks.
            if getattr(cache_of(named), "is_compileable", False):
                raise UsageError("mitigated: static caches are not allowed under a method; dynamic ones are")
            if method.needs_passages and not callable(known):
                check_one_list(named_arguments(network, positional, named), method.name, single=method.single)

        with ExitStack() as opened:
            opened.enter_context(method.apply(model, known))
            opened.enter_context(hooked([model.network.register_forward_pre_hook(refuse, with_kwargs=True)]))
            # This object, too: if the caller keeps nothing of what is installed, it and its hooks would be collected.
            for mark, value in ((INTERVENTION_MARK, str(method)), (INSTALLED, self)):
                setattr(model.network, mark, value)
                opened.callback(vars(model.network).pop, mark, None)
            self._open = opened.pop_all()
        if self._given is model and model.described:
            return model.described_by(model.family, misfit=f"no theory describes {method.name}")
        return self._given

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "mitigated":
        """Refuse: hooks of a copy would follow what the network itself reads."""
        raise UsageError(f"{self._method.name}: a model under a method is not copied; allowed: before it is, or after")

    def install(self) -> "mitigated":
        """Leave the model under the method for good, or until `remove`."""
        self.__enter__()
        return self

    def remove(self) -> None:
        """Take an installed method off again."""
        self._open.close()


def resolve_method(method: Method | str, model: HuggingFaceModel | None, *, strength: float | None = None) -> Method:
    """A method from an object, its spelling, or the path of a recipe; of fitted ones the model is the one they know."""
    if isinstance(method, str):
        method = read_recipe(method, model) if is_recipe(method) else MITIGATIONS.parse(method)
    if not isinstance(method, Method):
        raise UsageError(f"{method!r} is not a mitigation; known: {', '.join(MITIGATIONS)}")
    if isinstance(method, Mitigation) and method.fitted_to and model is not None:
        if other := difference(method.fitted_to, model):
            raise UsageError(f"{method.name} was fitted to another model, {other}")
        method = replace(method, fitted_to={})
    return method if strength is None else replace(method, strength=strength)


def answering_under(method: Method, responder: Responder) -> Responder:
    """A responder that answers under a method; those inside a model need a local one."""
    if isinstance(method, PromptMitigation):
        return Under(method, responder, method.replies)
    if not isinstance(responder, LocalResponder):
        raise UsageError(f"{method.name} acts inside a model; a model behind a server takes only prompt methods")
    inside: Any = resolve_method(method, responder.model)
    return Under(inside, LocalResponder(responder.model, responder.options), partial(_replies, inside))


def _spans(passages: Spans | Sequence[str], prompt: str | None, tokenizer: Any) -> Spans:
    """Token spans of passages that may be given as texts."""
    texts = [passage for passage in passages if isinstance(passage, str)]
    if not texts:
        return tuple(passages)  # type: ignore[arg-type]
    if prompt is None or tokenizer is None or len(texts) < len(passages):
        raise UsageError(
            "mitigated: passages given as texts need prompt= and tokenizer=, and no token spans among them"
        )
    places: list[tuple[int, int]] = []
    for number, text in enumerate(texts):
        begin = prompt.find(text, places[-1][1] if places else 0)
        if begin < 0 or not text:
            raise UsageError(
                f"mitigated: passage {number}, {text[:40]!r}, is not in the prompt behind the one before it"
            )
        places.append((begin, begin + len(text)))
    located, _ = locate(prompt, places, tokenizer, own_control=True)  # the user's own tokenizer reads it, as it is
    if located is None:
        raise UsageError("mitigated: the tokenizer has no character offsets; give passages as token spans")
    return located


def _loaded(network: Any, tokenizer: Any = None) -> HuggingFaceModel:
    """A user's own network as a model; its parameters and mode stay as they are."""
    modules = list(network.modules()) if isinstance(network, nn.Module) else []
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad] if modules else []
    modes = [module.training for module in modules]
    model = model_in_hand(network, tokenizer)
    for parameter in trained:
        parameter.requires_grad_(True)
    for module, training in zip(modules, modes, strict=True):
        module.training = training
    return model


def _replies(method: Mitigation, inner: LocalResponder, requests: Sequence[Request], **how: Any) -> list[Reply]:
    """The replies of a local model under a method.

    Prompts are read together, each with its own place at which the question begins. A method that has to know more of
    the passages than that takes one list of them, and so one prompt at a time.
    """
    model = inner.model
    if not method.needs_passages:
        with mitigated(model, method):
            return inner.respond(requests, **how)
    prompts = [encoded.prompt for encoded in encode_requests(inner.tokenizer, requests)]
    known: list[Spans] = []
    for request, prompt in zip(requests, prompts, strict=True):
        located, _ = locate(request.prompt, request.passages, inner.tokenizer, own_control=request.own_control)
        known.append(method.known(located or (), prompt.tolist()))
        method.check(model, known[-1])
    if method.needs_question:
        begins = [passages[-1][1] for passages in known]
        first = cache(lambda rows: torch.tensor([[begins[row]] for row in rows], device=model.device))
        entering = mitigated(model, method)
        entering.places = lambda: first(tuple(inner.reading) or (0,))  # it knows which ones it reads
        with entering:
            return inner.respond(requests, alike=begins, **how)
    replies: list[Reply] = []
    for request, prompt, passages in zip(requests, prompts, known, strict=True):
        inner.tried(prompt)  # without it: a trial cuts prompts where no prompt of its is cut
        with mitigated(model, method, passages=passages):
            replies += inner.respond([request], **how)
    return replies
