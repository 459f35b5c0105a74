"""Order retrieved documents for the model that will read them, in a LangChain pipeline.

    reorder = MeasuredReorder(run="runs/pairs")       # a run of `posbias evaluate` on that model
    documents = reorder.transform_documents(retriever.invoke(question))

It takes the place of `LongContextReorder`: the same interface, with the order from the model's own measured curve.
Relevance is read from each document's metadata; where a retriever gives none, its order alone counts (1, 1/2, 1/3 ...).
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from pydantic import BaseModel

import posbias


class MeasuredReorder(BaseDocumentTransformer, BaseModel):
    """A document transformer that puts relevant documents where the model uses them."""

    run: str
    """Directory of a run of `posbias evaluate` on the model."""
    score: str = "relevance_score"
    """Name of the documents' metadata that holds their relevance, a number >= 0."""

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The same documents in the order for this model."""
        if not documents:
            return []
        given = [document.metadata.get(self.score) for document in documents]
        if None in given:
            given = [1 / rank for rank in range(1, len(documents) + 1)]
        placed = posbias.place(given, self.run)
        return [documents[index] for index in placed.order]
