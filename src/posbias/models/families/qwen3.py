"""Qwen 3: Llama with an RMS norm on the queries and keys of each head."""

from posbias.models.families.base import FAMILIES
from posbias.models.families.llama_like import NormedQueriesAndKeys


@FAMILIES.register("qwen3")
class Qwen3(NormedQueriesAndKeys):
    """Qwen 3."""
