"""A ranker of Haystack in place of `LostInTheMiddleRanker` (`pip install posbias[haystack]`).

pipeline.add_component("placement", MeasuredReorder(directory="runs/pairs"))
"""

from haystack import Document, component

from posbias.integrations import placed_order


@component
class MeasuredReorder:
    """Puts relevant documents where the model uses them.

    Args:
        directory: Directory of a run of `posbias evaluate` on the model.
    """

    def __init__(self, directory: str) -> None:  # not `run`, which is what Haystack calls
        self.directory = directory

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Documents in the order for this model."""
        order = placed_order([document.score for document in documents], self.directory)
        return {"documents": [documents[index] for index in order]}
