"""On the linear reference model the Jacobian is the rollout, at every depth; dense Jacobians on real architectures."""

from typing import Any

import numpy as np
import pytest
import torch

from posbias import Architecture, MeasureOptions, UsageError, measure
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts import Prompts
from posbias.theory import rollout_profile

TOLERANCE = 1e-10
"""The issue's bound; both sides are float64 and differ by round-off of L N operations."""
N_POSITIONS = 24

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "causal": {"depth": 4, "heads": 2, "mixing": 0.4},
    "no residual": {"depth": 3, "mixing": 1.0},
    "no mixing": {"depth": 2, "mixing": [0.0, 0.3]},
    "window": {"depth": 5, "mask": "sliding_window(width=5)", "mixing": [0.6, 0.3, 0.2, 0.15, 0.12]},
    "prefix": {"depth": 3, "mask": "prefix(length=6)", "mixing": 0.5},
    "full": {"depth": 3, "mask": "full", "encoding": "decay(rate=0.7)", "mixing": 0.5},
    "alibi": {"depth": 4, "heads": 3, "encoding": "alibi", "mixing": [0.2, 0.37, 0.53, 0.7]},
    "decay": {"depth": 4, "encoding": "decay(rate=0.8)", "mixing": 0.3},
    "rope": {"depth": 3, "heads": 2, "encoding": "rope(base=100.0, head_dim=8)", "mixing": 0.6},
    "content": {"depth": 3, "heads": 2, "mixing": 0.5, "content": [[-30.0, 2.0], [0.5, 260.0], [1.0, -1.0]]},
    "window and alibi, mixed layers": {
        "depth": 3,
        "heads": 2,
        "mask": ["causal", "sliding_window(width=4)", ["causal", "prefix(length=3)"]],
        "encoding": ["alibi", "none", ["decay(rate=0.9)", "alibi"]],
        "mixing": [0.2, 0.9, 0.5],
    },
}


def _prompts(count=1):
    return Prompts(np.random.default_rng(0).integers(0, 64, (count, N_POSITIONS)))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_exact_jacobian_is_the_rollout(name):
    architecture = Architecture(**ARCHITECTURES[name])
    measured = measure(ReferenceTransformer(architecture), _prompts(), kinds="jacobian(exact=True)")
    expected = rollout_profile(architecture, n_positions=N_POSITIONS)
    np.testing.assert_allclose(measured.profiles["jacobian"].influence, expected, rtol=TOLERANCE, atol=1e-18)


@pytest.mark.parametrize("kind", ["jacobian(probes=1)", "probability", "logprob", "logit"])
def test_every_kind_is_the_rollout_when_positions_only_rescale_the_same_map(kind):
    """J_j = rollout_j times the identity: whatever covector is pulled back, its length cancels."""
    architecture = Architecture(**ARCHITECTURES["alibi"])
    measured = measure(ReferenceTransformer(architecture), _prompts(2), kinds=[kind])
    expected = rollout_profile(architecture, n_positions=N_POSITIONS)
    (profile,) = measured.profiles.values()
    np.testing.assert_allclose(profile.influence, expected, rtol=TOLERANCE)


TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
EXACT = "jacobian(exact=True)"


def measured(model, kinds, *, layers="all", **options):
    return measure(model, Prompts(TOKENS), kinds=kinds, options=MeasureOptions(layers=layers, **options))


@pytest.mark.parametrize("kind", [EXACT, "jacobian(probes=2)"])
def test_on_the_linear_model_layer_l_has_the_rollout_of_depth_l_plus_one(kind):
    settings = {"heads": 2, "encoding": "alibi", "mixing": 0.4}
    found = measured(ReferenceTransformer(Architecture(depth=5, **settings)), kind)
    assert found.depth.layers.tolist() == [0, 1, 2, 3, 4]
    for layer, profile in zip(found.depth.layers, found.depth.influence, strict=True):
        expected = rollout_profile(Architecture(depth=int(layer) + 1, **settings), n_positions=8)
        np.testing.assert_allclose(profile, expected, rtol=1e-10)
    # No norm follows the last layer: it is the Jacobian itself.
    np.testing.assert_allclose(found.depth.influence[-1], found.profiles["jacobian"].influence, rtol=1e-12)


@pytest.mark.parametrize(("output", "rows"), [("last", [7]), ("at(position=3)", [3]), ("mean(last=3)", [5, 6, 7])])
def test_every_layer_agrees_with_the_dense_jacobian(gpt2_64, output, rows):
    embeddings = gpt2_64.embed(torch.as_tensor(TOKENS)).detach()
    expected = []
    for layer in (0, 1):
        block = gpt2_64.network.get_submodule(f"transformer.h.{layer}")

        def stream(x, block=block):
            caught = []
            handle = block.register_forward_hook(lambda _module, _inputs, out: caught.append(out))
            gpt2_64.network(inputs_embeds=x, use_cache=False)
            handle.remove()
            out = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
            return out[0, rows].mean(dim=0)

        jacobian = torch.autograd.functional.jacobian(stream, embeddings)
        norms = jacobian.square().sum(dim=(0, 1, 3)).sqrt().numpy()
        expected.append(norms / norms.sum())
    np.testing.assert_allclose(measured(gpt2_64, EXACT, output=output).depth.influence, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("layers", "output", "words"),
    [
        ((0, 3), "last", "layer 3 is not in the network; layers are 0 to 2"),
        ("all", "target(tokens=[1])", "a hidden state looks at no given tokens"),
        ("some", "last", "allowed are all, or whole numbers"),
        ((), "last", 'must be "all"'),
        ((-1,), "last", ">= 0 or None"),
        ((1, 1), "last", "each once"),
    ],
)
def test_layers_that_do_not_fit_are_refused(llama, kernel_model, layers, output, words):
    with pytest.raises(UsageError, match=words):
        measured(llama, "logit", layers=layers, output=output)
    with pytest.raises(UsageError, match=r"layers need blocks in an nn\.ModuleList; Module has none"):
        measure(kernel_model, Prompts(TOKENS[:, :7]), options=MeasureOptions(layers="all"))
