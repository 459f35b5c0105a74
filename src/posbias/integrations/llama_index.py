"""A node postprocessor of LlamaIndex in place of `LongContextReorder` (`pip install posbias[llama-index]`).

engine = index.as_query_engine(node_postprocessors=[MeasuredReorder(run="runs/pairs")])
"""

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from posbias.integrations import placed_order


class MeasuredReorder(BaseNodePostprocessor):
    """Puts relevant nodes where the model uses them."""

    run: str
    """Directory of a run of `posbias evaluate` on the model."""

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex stores it."""
        return "MeasuredReorder"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        order = placed_order([node.score for node in nodes], self.run)
        return [nodes[index] for index in order]
