"""What answering took in every arm: seconds, requests, tokens, memory.

Tokens are those that a model is run on, for prompts, scored answers and generated ones; beginnings that prompts share
count once where they are run once. A method's own passes are among them: those in which it sorts passages, those of the
unchanged model and of dummies beside the answer's, and as many as there are bases where each has its own. On a server
they are the tokens that it counts, of every prompt that is asked in place of one; a kept answer counts as it did when
it was given, though nothing is paid for it again.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from posbias.evaluation.responders import LocalResponder, Request
from posbias.measurement.cost import peak_tensor_bytes
from posbias.mitigation.trial.arms import Arm
from posbias.runs.parts import PartStore
from posbias.runs.records import Record


def effort_of(record: Record) -> dict[str, Any]:
    """Seconds, requests and tokens of one arm's evaluation; tokens are None where nobody counted them all."""
    described = record.resolved["responder"]
    tokens = described.get("tokens_processed")
    if tokens is None and "prompt_tokens" in described and not described.get("uncounted"):
        counted = ("prompt_tokens", "generated_tokens", "reused_tokens")
        tokens = sum(described.get(name, 0) for name in counted)
    return {"seconds": record.scalars["seconds"], "requests": record.scalars["examples"], "tokens": tokens}


def peaks_of(arms: Sequence[Arm], requests: Sequence[Request], store: PartStore) -> list[int | None]:
    """Most bytes that tensors beside the weights take at once in every arm, for the longest text; None on a server."""
    longest = replace(max(requests, key=lambda request: len(request.text)), max_tokens=2)
    found: list[int | None] = []
    for arm in arms:
        inner = arm.responder
        if not isinstance(inner, LocalResponder):
            found.append(None)
            continue
        fresh = replace(arm, responder=LocalResponder(inner.model, inner.options))  # nothing of other prompts is there

        def measured(arm: Arm = fresh, device: Any = inner.model.device) -> dict[str, np.ndarray]:
            respond = partial(arm.answering.respond, [longest], score=True)
            return {"bytes": np.array([peak_tensor_bytes(respond, device)])}

        found.append(int(store.get(f"memory-{arm.slug}", measured)["bytes"][0]))
    return found
