"""Nemotron and Minitron: LayerNorm with gain 1 + weight, a plain MLP with squared ReLU, partial rotation."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import LlamaLike


@FAMILIES.register("nemotron")
class Nemotron(LlamaLike):
    """Nemotron. transformers draws new weights with norms at weight 1, hence gain 2; published ones have their own."""
