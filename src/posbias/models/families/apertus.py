"""Apertus: Llama with norms on queries and keys and a plain MLP whose activation, xIELU, is learned."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import NormedQueriesAndKeys


@FAMILIES.register("apertus")
class Apertus(NormedQueriesAndKeys):
    """Apertus."""

    attention_norm = "attention_layernorm"
    mlp_norm = "feedforward_layernorm"
