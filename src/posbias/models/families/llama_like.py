"""What Llama and the decoders modelled on it share: RMS norms, separate projections, a gated MLP, rotary positions."""

from dataclasses import replace
from typing import Any

from posbias.architecture import Causal, Mask, SlidingWindow
from posbias.errors import UsageError
from posbias.models.families.base import AttentionParts, Block, Family, MlpParts
from posbias.models.families.projections import gated_mlp, neighbours_as_halves, plain_mlp, separate_attention


class LlamaLike(Family):
    """A pre-norm decoder with rotary positions; subclasses say what differs."""

    def mask(self, config: Any, layer: int) -> Mask:
        """Causal; a sliding window in the layers whose `layer_types` entry says so."""
        types = getattr(config, "layer_types", None)
        return window_mask(config) if types is not None and types[layer] == "sliding_attention" else Causal()

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Separate projections; fewer key heads than heads where they are grouped."""
        return separate_attention(
            block.attention,
            block.attention_output,
            heads=self.heads(config),
            key_heads=int(config.num_key_value_heads),
            scale=block.attention.scaling,  # type: ignore[arg-type]
        )

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The gated MLP, or a plain one where there is no gate.

        Raises:
            UsageError: the block has a mixture of experts instead.
        """
        if hasattr(block.mlp, "experts"):
            raise UsageError(
                f"MLPs of {self.name} are mixtures of experts, which only the power rollout follows; one MLP is needed"
            )
        if hasattr(block.mlp, "gate_proj"):
            return gated_mlp(block.mlp, block.mlp.act_fn)
        return plain_mlp(block.mlp.get_submodule("up_proj"), block.mlp.get_submodule("down_proj"), block.mlp.act_fn)

    def unsupported(self, config: Any) -> str | None:
        """Bidirectional variants (embedding models) are not decoders."""
        return "use_bidirectional_attention is set" if getattr(config, "use_bidirectional_attention", False) else None


class NormedQueriesAndKeys(LlamaLike):
    """The same with a norm on queries and on keys before they turn, of each head or over all features."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, and the two norms."""
        query_norm = self.norm(block.attention.get_submodule("q_norm"))
        key_norm = self.norm(block.attention.get_submodule("k_norm"))
        return replace(super().attention_parts(block, config), query_norm=query_norm, key_norm=key_norm)


class TurnedNeighbours(LlamaLike):
    """The same with neighbouring features turned instead of halves, of whole heads or of their first features."""

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """Llama's, with the turned features of each head listed so that halves turn."""
        parts = super().attention_parts(block, config)
        share = float(config.rope_parameters.get("partial_rotary_factor", 1.0))
        return neighbours_as_halves(parts, int(parts.head_dim * share))


def window_mask(config: Any) -> Mask:
    """`config.sliding_window` as a mask; transformers counts the query's own position, as we do."""
    width = getattr(config, "sliding_window", None)
    return Causal() if width is None else SlidingWindow(width=int(width))
