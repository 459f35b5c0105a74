"""Order retrieved nodes for the model that will read them, in a LlamaIndex query engine.

    engine = index.as_query_engine(node_postprocessors=[MeasuredReorder(run="runs/pairs")])

It takes the place of `LongContextReorder`: the same interface, with the order from the model's own measured curve.
Nodes without a score count by their order alone (1, 1/2, 1/3 ...).
"""

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

import posbias


class MeasuredReorder(BaseNodePostprocessor):
    """A node postprocessor that puts relevant nodes where the model uses them."""

    run: str
    """Directory of a run of `posbias evaluate` on the model."""

    @classmethod
    def class_name(cls) -> str:
        """The name LlamaIndex stores it under."""
        return "MeasuredReorder"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if not nodes:
            return []
        given = [node.score for node in nodes]
        if None in given:
            given = [1 / rank for rank in range(1, len(nodes) + 1)]
        placed = posbias.place(given, self.run)
        return [nodes[index] for index in placed.order]
