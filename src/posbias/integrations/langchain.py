"""A document transformer of LangChain in place of `LongContextReorder` (`pip install posbias[langchain]`).

reorder = MeasuredReorder(run="runs/pairs")
documents = reorder.transform_documents(retriever.invoke(question))
"""

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from pydantic import BaseModel

from posbias.integrations import placed_order


class MeasuredReorder(BaseDocumentTransformer, BaseModel):
    """Puts relevant documents where the model uses them."""

    run: str
    """Directory of a run of `posbias evaluate` on the model."""
    score: str = "relevance_score"
    """Name of the documents' metadata that holds their relevance; `placed_order` says which numbers it takes."""

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Documents in the order for this model."""
        order = placed_order([document.metadata.get(self.score) for document in documents], self.run)
        return [documents[index] for index in order]
