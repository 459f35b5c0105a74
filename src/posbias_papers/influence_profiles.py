"""Influence of every position on the last one, of many trained members at once: what theories say and what is measured.

`uniform_rollout` knows masks, decay and residual shares; `rollout` each member's own mean attention as well;
`power_rollout` squares attention and local maps; `mean_field` knows variances at initialisation; `jacobian` is
measured. Members of one shape are computed together. docs/theory, sections 1, 4 and 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.reference.config import ReferenceShape, shape_of
from posbias.models.reference.forward import embedded, entrance, hidden_states, layer_inputs, split
from posbias.models.reference.network import ReferenceTransformer
from posbias.models.reference.parameters import constants_of, draw_parameters, stacked
from posbias.prompts.prompts import Prompts
from posbias.tasks.synthetic import stack_tasks
from posbias.theory.mean_field import mean_field
from posbias.theory.power_rollout import power_rollout_prompt
from posbias.theory.power_rollout.rollout import describe
from posbias.training import Member, TrainedMember
from posbias.training.trainer import group

SEQUENCES = 32
"""Sequences over which attention, residual shares and Jacobian norms are averaged."""
PROBES = 8
"""Random sign vectors behind each Jacobian norm."""
KNOWN_SEQUENCES = 8
"""Sequences of vectors whose Gram matrices mean field starts from; their mean squares are averaged."""
TOGETHER = 32
"""Members of one shape computed at once."""
KINDS = ("uniform_rollout", "rollout", "power_rollout", "jacobian")
MOMENTS = ("initial", "trained")

Weights = dict[str, Tensor]
Profiles = dict[str, Float64[np.ndarray, "n_positions"]]


@dataclass(frozen=True, eq=False)
class Profiled:
    """A member and the parameters it has at the moment of interest."""

    member: Member
    parameters: Weights


def initial(member: Member) -> Profiled:
    """A member before its first step: the parameters its training began with."""
    return Profiled(member, draw_parameters(member.config, member.generator()))


def profiles_by_moment(members: Sequence[TrainedMember], *, seed: int) -> list[Profiles]:
    """Profiles of members by `KIND/MOMENT`: every kind before and after training, mean field before.

    Args:
        members: Of any shapes; all finished with parameters.
        seed: Seed of `influence_profiles` and `mean_field_profiles`.
    """
    before = influence_profiles([initial(trained.member) for trained in members], seed=seed)
    after = influence_profiles([Profiled(trained.member, trained.parameters or {}) for trained in members], seed=seed)
    fields = mean_field_profiles([trained.member for trained in members], seed=seed)
    by_member = []
    for first, last, field in zip(before, after, fields, strict=True):
        moments = {"initial": first, "trained": last}
        profiles = {f"{kind}/{moment}": row[kind] for moment, row in moments.items() for kind in KINDS}
        by_member.append(profiles if field is None else {**profiles, "mean_field/initial": field})
    return by_member


def mean_field_profiles(members: Sequence[Member], *, seed: int = 0) -> list[Float64[np.ndarray, "n_positions"] | None]:
    """Mean field at initialisation, from the variances of each member's first parameters.

    Members of one configuration and seed begin with the same parameters, whatever their task; each is computed once for
    the same inputs. Of a network of vector inputs the theory knows the vectors of some sequences.

    Args:
        members: Any shapes.
        seed: Of those sequences.

    Returns:
        A profile per member; None if the theory does not know the network (values not drawn for every head).
    """
    computed: dict[tuple[object, ...], Float64[np.ndarray, n_positions] | None] = {}
    profiles = []
    for member in members:
        parameters = initial(member).parameters
        vectors = _sequences_of_vectors(member, seed)
        # Equal parameters are not enough: a residual or a mask has none.
        network = (repr(member.config.to_dict()), member.task.n_positions)
        contents = () if vectors is None else (vectors.numpy().tobytes(),)
        key = (*network, *contents, *(values.numpy().tobytes() for values in parameters.values()))
        if key not in computed:
            computed[key] = _mean_field_profile(member, parameters, vectors)
        profiles.append(computed[key])
    return profiles


def _sequences_of_vectors(member: Member, seed: int) -> Float[Tensor, "batch position feature"] | None:
    """Inputs of the member's task, None if these are tokens."""
    if member.config.vocabulary_size is not None:
        return None
    sequences: Tensor = stack_tasks([member.task], [seed + member.seed]).batch(0, KNOWN_SEQUENCES).inputs[0]
    return sequences


def _mean_field_profile(
    member: Member, parameters: Weights, vectors: Float[Tensor, "batch position feature"] | None
) -> Float64[np.ndarray, "n_positions"] | None:
    try:
        if vectors is None:
            model, prompts = ReferenceTransformer(member.config, parameters), None
        else:
            model, prompts = _with_prompts(Profiled(member, parameters), vectors)
        model.drawn = True  # the weights that training begins with
        return mean_field(model, member.task.n_positions, prompts=prompts).profile.influence
    except UsageError:
        return None


def _with_prompts(profiled: Profiled, inputs: Tensor) -> tuple[ReferenceTransformer, Prompts]:
    """The member as a model, and inputs of its task [batch, position], or vectors, as prompts that name them."""
    items = inputs.flatten(0, 1) if inputs.is_floating_point() else None
    token_ids = inputs.numpy() if items is None else np.arange(len(items)).reshape(inputs.shape[:2])
    return ReferenceTransformer(profiled.member.config, profiled.parameters, items=items), Prompts(token_ids)


def influence_profiles(members: Sequence[Profiled], *, seed: int) -> list[Profiles]:
    """Every kind of profile of every member.

    Args:
        members: Any shapes.
        seed: Of the sequences (the same for all members of one task and seed) and of the probes.

    Returns:
        By kind a profile over the input positions; each sums to 1.
    """
    by_index: dict[int, Profiles] = {}
    for indices in group([profiled.member for profiled in members], stack_size=TOGETHER):
        chosen = [members[index] for index in indices]
        by_index |= dict(zip(indices, _stack_profiles(chosen, seed), strict=True))
    return [by_index[index] for index in range(len(members))]


def _stack_profiles(members: Sequence[Profiled], seed: int) -> list[Profiles]:
    first = members[0].member
    shape = replace(shape_of(first.config, first.task.n_positions), merges=False)
    weights = stacked([profiled.parameters for profiled in members])
    constants = stacked([constants_of(profiled.member.config, first.task.n_positions) for profiled in members])
    tasks = [profiled.member.task for profiled in members]
    inputs = stack_tasks(tasks, [seed + profiled.member.seed for profiled in members]).batch(0, SEQUENCES).inputs
    vectors = embedded(shape, weights, inputs).detach()
    mixing, attention = layer_statistics(shape, weights, constants, vectors)
    uniform = torch.softmax(constants["bias"].double(), dim=-1).mean(dim=2)
    profiles = {
        "uniform_rollout": pulled(mixing, uniform),
        "rollout": pulled(mixing, attention),
        "power_rollout": torch.stack([power_profile(*pair) for pair in zip(members, inputs, strict=True)]),
        "jacobian": jacobian_norms(shape, weights, constants, vectors, seed=seed),
    }
    return [{name: values[index].numpy() for name, values in profiles.items()} for index in range(len(members))]


@torch.no_grad()
def layer_statistics(
    shape: ReferenceShape, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor], vectors: Tensor
) -> tuple[Float[Tensor, "member layer"], Float[Tensor, "member layer query key"]]:
    """Each layer's mixing |a| / (|x| + |a|) and mean attention, over sequences and heads (and positions), in float64.

    Args:
        shape: Of all members.
        weights: Parameters [member, ...].
        constants: Likewise.
        vectors: Embedded inputs [member, batch, position, feature].
    """
    from posbias.models.reference.forward import attention_maps

    plain = replace(shape, vocabulary_size=None)
    maps = attention_maps(plain, dict(weights), dict(constants), vectors).double().mean(dim=(2, 3))
    mixing = []
    for parameters, fixed, stream in layer_inputs(
        plain, weights, constants, entrance(plain, weights, constants, vectors)
    ):
        residual, added = split(plain, parameters, fixed, stream, rows=None)
        size = added.double().norm(dim=-1)
        carried = torch.zeros_like(size) if residual is None else residual.double().norm(dim=-1)
        mixing.append((size / (size + carried).clamp_min(torch.finfo(torch.float64).tiny)).mean(dim=(1, 2)))
    return torch.stack(mixing, dim=1), maps.transpose(0, 1)


def pulled(
    mixing: Float[Tensor, "member layer"], attention: Float[Tensor, "member layer query key"]
) -> Float[Tensor, "member position"]:
    """Rollout of the last position: its row of the product of (1 - m_l) I + m_l A_l, top layer first."""
    row = torch.zeros(len(mixing), attention.shape[-1], dtype=torch.float64)
    row[:, -1] = 1
    for layer in reversed(range(mixing.shape[1])):
        share = mixing[:, layer, None]
        row = (1 - share) * row + share * torch.einsum("mq,mqk->mk", row, attention[:, layer])
    return row


def power_profile(profiled: Profiled, inputs: Tensor) -> Float[Tensor, "position"]:
    """Mean of the power rollouts (diagonal, with key path) of a member's sequences, each normalised.

    Args:
        profiled: The member.
        inputs: Token ids [batch, position], or vectors.
    """
    model, prompts = _with_prompts(profiled, inputs)
    apart = describe(model, n_positions=prompts.n_positions)
    rows = [power_rollout_prompt(model, ids, description=apart) for ids in prompts.token_ids]
    return torch.from_numpy(np.mean(rows, axis=0))


def jacobian_norms(
    shape: ReferenceShape, weights: Mapping[str, Tensor], constants: Mapping[str, Tensor], vectors: Tensor, *, seed: int
) -> Float[Tensor, "member position"]:
    """Norm of the last hidden state's Jacobian by each input vector, each sequence normalised, then their mean.

    Estimated with random signs, E |u J|^2 = |J|^2. Arguments as `layer_statistics`.
    """
    plain = replace(shape, vocabulary_size=None)
    entered = vectors.clone().requires_grad_(True)
    hidden = hidden_states(plain, dict(weights), dict(constants), entered, rows=(shape.n_positions - 1,))
    generator = torch.Generator().manual_seed(seed)
    power = torch.zeros(vectors.shape[:-1], dtype=torch.float64)
    for probe in range(PROBES):
        signs = torch.randint(0, 2, hidden.shape[1:], generator=generator).to(hidden.dtype) * 2 - 1
        (gradient,) = torch.autograd.grad((hidden * signs).sum(), entered, retain_graph=probe + 1 < PROBES)
        power += gradient.double().square().sum(dim=-1)
    norms = power.sqrt()
    shares = norms / norms.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return shares.mean(dim=1)
