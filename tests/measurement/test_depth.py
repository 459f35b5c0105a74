"""How the profile forms with depth: exact on the linear reference model, dense Jacobians on real architectures."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posbias import Architecture, MeasureOptions, RunError, UsageError, measure
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import combine
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import PromptMeasurement, measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import packed, unpacked
from posbias.theory import rollout_profile

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
EXACT = "jacobian(exact=True)"


def _options(layers: object = "all", **others: object) -> MeasureOptions:
    return MeasureOptions(layers=layers, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [EXACT, "jacobian(probes=2)"])
def test_on_the_linear_model_layer_l_has_the_rollout_of_depth_l_plus_one(kind: str) -> None:
    settings = {"heads": 2, "encoding": "alibi", "mixing": 0.4}
    model = ReferenceTransformer(Architecture(depth=5, **settings))
    prompts = Prompts(np.random.default_rng(0).integers(0, 64, (2, 24)))
    depth = measure(model, prompts, kinds=kind, options=_options()).depth
    assert depth is not None
    assert depth.layers.tolist() == [0, 1, 2, 3, 4]
    for layer, profile in zip(depth.layers, depth.influence, strict=True):
        expected = rollout_profile(Architecture(depth=int(layer) + 1, **settings), n_positions=24)
        np.testing.assert_allclose(profile, expected, rtol=1e-10)


def test_the_last_layer_is_the_jacobian_itself_where_no_norm_follows() -> None:
    model = ReferenceTransformer(Architecture(depth=3, heads=2, encoding="decay(rate=0.8)", mixing=0.5))
    measured = measure_prompt(
        model, TOKENS, kinds=resolve_kinds("jacobian"), key=(0, 0), options=PassOptions(layers=(2,))
    )
    assert measured.depth is not None
    np.testing.assert_allclose(measured.depth[0], measured.norms["jacobian"], rtol=1e-12)


@pytest.mark.parametrize(("output", "rows"), [("last", [7]), ("at(position=3)", [3]), ("mean(last=3)", [5, 6, 7])])
def test_every_layer_agrees_with_the_dense_jacobian(gpt2_64: HuggingFaceModel, output: str, rows: list[int]) -> None:
    embeddings = gpt2_64.embed(torch.as_tensor(TOKENS)[None]).detach()
    expected = []
    for layer in (0, 1):
        block = gpt2_64.network.get_submodule(f"transformer.h.{layer}")

        def stream(x: torch.Tensor, block: torch.nn.Module = block) -> torch.Tensor:
            caught = []
            handle = block.register_forward_hook(lambda _module, _inputs, out: caught.append(out))
            gpt2_64.network(inputs_embeds=x, use_cache=False)
            handle.remove()
            out = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
            return out[0, rows].mean(dim=0)

        jacobian = torch.autograd.functional.jacobian(stream, embeddings)
        expected.append(jacobian.square().sum(dim=(0, 1, 3)).sqrt().numpy())
    options = PassOptions(layers="all", output=output)
    found = measure_prompt(gpt2_64, TOKENS, kinds=resolve_kinds(EXACT), key=(0, 0), options=options).depth
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_one_forward_pass_serves_all_layers(gpt2_64: HuggingFaceModel) -> None:
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    handle = gpt2_64.network.register_forward_hook(count)
    measure_prompt(gpt2_64, TOKENS, kinds=resolve_kinds("logit"), key=(0, 0))
    without = passes
    measure_prompt(gpt2_64, TOKENS, kinds=resolve_kinds("logit"), key=(0, 0), options=PassOptions(layers="all"))
    handle.remove()
    assert passes == 2 * without  # the pass that serves the kinds serves the layers, too


def test_depth_survives_storage_and_averaging(llama: Model, make_prompts: Callable[..., Prompts]) -> None:
    prompts = make_prompts(llama, 4, 9)
    options = _options((0, 2))
    kinds = resolve_kinds("jacobian(probes=3)")
    whole = measure(llama, prompts, kinds=kinds, options=options)
    alone = [
        measure_prompt(llama, tokens, kinds=kinds, key=(0, index), options=options.passes)
        for index, tokens in enumerate(prompts.token_ids)
    ]
    stored = [PromptMeasurement.of_piece(unpacked(packed(entry))) for entry in alone]
    again = combine(stored, kinds=kinds, options=options)
    assert whole.depth is not None
    assert again.depth is not None
    assert again.depth.layers.tolist() == whole.depth.layers.tolist() == [0, 2]
    np.testing.assert_equal(vars(again.depth), vars(whole.depth))
    assert np.all(again.depth.low <= again.depth.influence)
    assert np.all(again.depth.influence <= again.depth.high)
    assert measure(llama, prompts, kinds="logit").depth is None


@pytest.mark.parametrize(
    ("layers", "output", "words"),
    [
        ((0, 3), "last", "layer 3 is not in the network; layers are 0 to 2"),
        ("all", "target(tokens=[1])", "a hidden state looks at no given tokens"),
    ],
)
def test_layers_that_do_not_fit_are_refused(llama: Model, layers: object, output: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        measure(llama, Prompts(TOKENS[None]), kinds="logit", options=_options(layers, output=output))


def test_a_network_without_blocks_has_no_depth(kernel_model: Model) -> None:
    with pytest.raises(UsageError, match=r"layers need blocks in an nn\.ModuleList; Module has none"):
        measure(kernel_model, Prompts(np.array([[1, 2, 3, 4, 5, 6, 7]])), options=_options())


@pytest.mark.parametrize(
    ("layers", "words"),
    [("some", "allowed are whole numbers"), ((), 'must be "all"'), ((-1,), ">= 0 or None"), ((1, 1), "each once")],
)
def test_wrong_layers_are_refused(layers: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _options(layers)


def test_a_layer_that_depends_on_nothing_has_no_profile() -> None:
    silent = PromptMeasurement({"logit": np.ones(3)}, layers=(1,), depth=np.zeros((1, 3)))
    with pytest.raises(RunError, match="layer 1 on prompt 0 depends on no position"):
        combine([silent], kinds="logit")
