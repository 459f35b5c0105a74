"""The adapters obey the real packages' interfaces and give the order of `posbias.place`."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import posbias as pb
from posbias.runs.records import Record

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RELEVANCE = [0.6, 0.3, 0.06, 0.04]
CURVE = np.array([0.2, 0.5, 0.9, 0.7])


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    """A run whose model uses the third place best and the first one least."""
    scores = (np.random.default_rng(0).random((200, 4)) < CURVE).astype(np.float64)
    nothing = np.full((200, 4), np.nan)
    resolved = {"task": "documents(documents=4)", "count": 200, "positions": [0, 1, 2, 3]}
    scalars = {"n_items": 4, "curves": {}, "skipped": {}, "cut_off": 0, "examples": 800}
    record = Record("evaluate", {}, resolved, scalars)
    record.arrays = {
        "positions": np.arange(4),
        "scores/correct": scores,
        "scores/logprob": nothing,
        "scores/first_rank": nothing,
    }
    record.save(tmp_path)
    assert pb.place(RELEVANCE, tmp_path).order == (3, 2, 0, 1)
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_langchain_documents_are_reordered(run):
    documents = importlib.import_module("langchain_core.documents")
    reorder = example("langchain_placement").MeasuredReorder(run=run)
    assert isinstance(reorder, documents.BaseDocumentTransformer)
    given = [
        documents.Document(page_content=str(index), metadata={"relevance_score": value})
        for index, value in enumerate(RELEVANCE)
    ]
    assert [found.page_content for found in reorder.transform_documents(given)] == ["3", "2", "0", "1"]
    unscored = [documents.Document(page_content=str(index)) for index in range(4)]
    assert [found.page_content for found in reorder.transform_documents(unscored)] == ["3", "2", "0", "1"]
    assert list(reorder.transform_documents([])) == []


@pytest.mark.filterwarnings("ignore")
def test_llama_index_nodes_are_reordered(run):
    schema = importlib.import_module("llama_index.core.schema")
    reorder = example("llama_index_placement").MeasuredReorder(run=run)
    nodes = [
        schema.NodeWithScore(node=schema.TextNode(text=str(index)), score=value)
        for index, value in enumerate(RELEVANCE)
    ]
    found = reorder.postprocess_nodes(nodes, query_str="which?")
    assert [node.text for node in found] == ["3", "2", "0", "1"]
    assert [node.score for node in found] == [0.04, 0.06, 0.6, 0.3]
    assert reorder.postprocess_nodes([]) == []
