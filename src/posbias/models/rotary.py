"""Rotary positions whose angles depend on how many positions a pass has, and the lengths they are stretched to.

Most kinds turn a position by the same angle in every pass. LongRoPE takes other frequencies (PhiMoE: another factor,
too) for all positions of a pass that is longer than the original context; dynamic NTK has frequencies of its own for
every length beyond the configured one. Keys that were turned in one sort of pass fit no pass of another.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

CHANGING_ROPE = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the prompt."""
ORIGINAL = "original_max_position_embeddings"
"""What a configuration calls the context length before it was stretched."""
WINDOWED = "sliding_attention"
"""Layers that see near keys only, so that their angles bound no context."""


def changing_kinds(module: nn.Module) -> set[str]:
    """Kinds of RoPE among a module's own whose frequencies depend on the length of the prompt."""
    kinds = getattr(module, "rope_type", "default")
    kinds = set(kinds.values()) if isinstance(kinds, Mapping) else {kinds}
    return {str(kind) for kind in kinds if any(word in str(kind) for word in CHANGING_ROPE)}


@dataclass(frozen=True)
class AngleLengths:
    """Lengths of a pass (positions, cached ones included) at which a network's rotary angles become others."""

    switches: tuple[int, ...] = ()
    """A pass longer than one of these has other angles at all of its positions."""
    moving_from: int | None = None
    """Beyond it, the angles of every length are their own; None: nowhere."""

    @classmethod
    def of(cls, network: nn.Module) -> "AngleLengths":
        """Read a network's rotary modules; a kind that does not say where it begins to change does so at once."""
        switches: set[int] = set()
        moving: list[int] = []
        for module in network.modules():
            if not changing_kinds(module):
                continue
            settings = list(_settings(getattr(module, "config", None)).values())
            longer = [
                rope.get(ORIGINAL) for rope in settings if rope.get("rope_type") == "longrope" or "long_mscale" in rope
            ]
            switches |= {length for length in longer if isinstance(length, int)}
            if any("dynamic" in str(rope.get("rope_type")) for rope in settings):
                moving.append(int(getattr(module, "original_max_seq_len", 0)))
            elif not longer or None in longer:
                moving.append(0)
        return cls(tuple(sorted(switches)), min(moving, default=None))

    def angles(self, n_positions: int) -> tuple[int, int]:
        """A name of the angles in a pass of so many positions: passes of one name can share keys."""
        moves = self.moving_from is not None and n_positions > self.moving_from
        return sum(n_positions > switch for switch in self.switches), n_positions if moves else 0


def stretched_positions(config: Any) -> int | None:
    """The positions that YaRN stretches a context to, factor times the original; None unless all full layers have it.

    Published configurations may leave `max_position_embeddings` at the original length (Qwen 2.5) or name the stretched
    one (DeepSeek-V3).
    """
    full = [rope for name, rope in _settings(config).items() if name != WINDOWED]
    if not full or any(rope.get("rope_type") != "yarn" for rope in full):
        return None
    lengths = []
    for rope in full:
        factor, original = rope.get("factor"), rope.get(ORIGINAL)
        if not isinstance(factor, int | float) or not isinstance(original, int):
            return None
        lengths.append(int(factor * original))
    return min(lengths)


def _settings(config: Any) -> dict[str, Mapping[str, Any]]:
    """The rotary parameters of a configuration, one set for every sort of layers, or one without a name for all."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return {}
    return {name: rope for name, rope in parameters.items() if isinstance(rope, Mapping)} or {"": parameters}


def turned_by(
    values: Float[Tensor, "*rows feature"],
    cosine: Float[Tensor, "*shown pair"],
    sine: Float[Tensor, "*shown pair"],
) -> Float[Tensor, "*rows feature"]:
    """Turn queries or keys by angles, half against half; features beyond the pairs stay."""
    pairs = cosine.shape[-1]
    precise = torch.promote_types(values.dtype, torch.float32)
    whole = values.to(precise)
    first, second, unturned = whole[..., :pairs], whole[..., pairs : 2 * pairs], whole[..., 2 * pairs :]
    cosine, sine = cosine.to(whole), sine.to(whole)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, unturned], -1).to(values.dtype)
