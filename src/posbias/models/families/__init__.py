"""Families of decoders by kinship; importing this package registers them all in `FAMILIES`."""

from posbias.models.families import alibi, experts, gpt_like, hybrids, llama_like

__all__ = ["alibi", "experts", "gpt_like", "hybrids", "llama_like"]
