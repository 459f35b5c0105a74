"""Many short prompts: how many a second, beside the bare passes in a loop and captum in a loop."""

from collections.abc import Callable

import gradients
import numpy as np

import posbias as pb
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts import Prompts

Method = Callable[[], np.ndarray]
PEER = "captum, one logit row"


def ours(model: HuggingFaceModel, prompts: Prompts, *, mixing: bool) -> Method:
    """`posbias.measure` of all prompts, intervals included."""
    if not mixing:
        model = model.described_by(model.family, misfit="mixing is not timed")
    return lambda: np.asarray(pb.measure(model, prompts, kinds="probability").per_prompt["probability"])


def looped(method: Callable[[HuggingFaceModel, Prompts], Method], model: HuggingFaceModel, prompts: Prompts) -> Method:
    """One prompt after another."""
    singles = [method(model, Prompts(prompts.token_ids[index : index + 1])) for index in range(prompts.count)]
    return lambda: np.stack([single() for single in singles])


def build(model: HuggingFaceModel, prompts: Prompts) -> dict[str, Method]:
    """Methods by name, asserted to give the floor's profiles; captum where it is installed."""
    methods = {
        "floor": looped(gradients.floor, model, prompts),
        "posbias": ours(model, prompts, mixing=False),
        "posbias, with mixing": ours(model, prompts, mixing=True),
    }
    if gradients.installed(PEER):
        methods[PEER] = looped(gradients.METHODS[PEER], model, prompts)
    expected = methods["floor"]()
    for name, method in methods.items():
        np.testing.assert_allclose(method(), expected, rtol=gradients.ROUND_OFF, err_msg=name)
    return methods
