"""Components of the real packages give the order of `posbias.place`, whatever range the scores have."""

import importlib
import json

import numpy as np
import pytest

import posbias as pb
from posbias import Record, UsageError
from posbias.evaluation.curve import position_curve
from posbias.integrations import placed_order
from posbias.results.result import as_stored

RELEVANCE = [0.6, 0.3, 0.06, 0.04]
CURVE = np.array([0.2, 0.5, 0.9, 0.7])


def saved(directory, curve, count):
    """A run of a model that uses the four places so."""
    scores = (np.random.default_rng(0).random((count, 4)) < curve).astype(np.float64)
    nothing = np.full((count, 4), np.nan)
    resolved = {"task": "documents(documents=4)", "count": count, "positions": [0, 1, 2, 3]}
    curves = {"accuracy": as_stored(position_curve(scores, positions=range(4)))}
    scalars = {"n_items": 4, "curves": curves, "skipped": {}, "cut_off": 0, "reading": {}, "examples": 4 * count}
    record = Record("evaluate", {}, resolved, scalars)
    record.arrays = {
        "positions": np.arange(4),
        "scores/correct": scores,
        **{f"scores/{name}": nothing for name in ("logprob", "answer_tokens", "first_rank")},
    }
    return str(record.save(directory))


@pytest.fixture
def run(tmp_path):
    """A run whose model uses the third place best and the first one least."""
    saved(tmp_path, CURVE, 200)
    assert pb.place(RELEVANCE, tmp_path).order == (3, 2, 0, 1)
    return str(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_langchain_documents_are_reordered(run):
    documents = importlib.import_module("langchain_core.documents")
    reorder = importlib.import_module("posbias.integrations.langchain").MeasuredReorder(run=run)
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
    reorder = importlib.import_module("posbias.integrations.llama_index").MeasuredReorder(run=run)
    nodes = [
        schema.NodeWithScore(node=schema.TextNode(text=str(index)), score=value)
        for index, value in enumerate(RELEVANCE)
    ]
    found = reorder.postprocess_nodes(nodes, query_str="which?")
    assert [node.text for node in found] == ["3", "2", "0", "1"]
    assert [node.score for node in found] == [0.04, 0.06, 0.6, 0.3]
    assert reorder.postprocess_nodes([]) == []


@pytest.mark.filterwarnings("ignore")
def test_haystack_documents_are_reordered(run):
    haystack = importlib.import_module("haystack")
    reorder = importlib.import_module("posbias.integrations.haystack").MeasuredReorder(directory=run)
    pipeline = haystack.Pipeline()
    pipeline.add_component("placement", reorder)
    given = [haystack.Document(content=str(index), score=value) for index, value in enumerate(RELEVANCE)]
    placed = pipeline.run({"placement": {"documents": given}})["placement"]["documents"]
    assert [document.content for document in placed] == ["3", "2", "0", "1"]
    restored = haystack.Pipeline.loads(pipeline.dumps(), allowed_modules=["posbias.integrations.haystack"])
    assert restored.run({"placement": {"documents": []}})["placement"]["documents"] == []


def test_scores_of_any_range_are_relevance(run):
    log_odds = [float(np.log(share / (1 - share))) for share in RELEVANCE]
    assert placed_order(log_odds, run) == placed_order(RELEVANCE, run) == (3, 2, 0, 1)
    assert placed_order([-1000.0, -999.0, 1000.0, -2.0], run)[2] == 2, "no overflow"
    assert placed_order([0.9, None, 0.1, 0.2], run) == placed_order([1, 1 / 2, 1 / 3, 1 / 4], run)
    assert placed_order([], run) == ()
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"relevance must be finite numbers, got (nan|inf)"):
            placed_order([0.5, wrong, 0.1, 0.2], run)


def test_log_odds_rank_passages_however_large_they_are(run):
    """Their probabilities are all 1, or all 0."""
    assert placed_order([38.0, 45.0, 41.0, -1.0], run) == (3, 0, 1, 2)
    assert placed_order([-800.0, -1000.0, -900.0, -2000.0], run) == (3, 1, 0, 2)


@pytest.mark.parametrize(("curve", "count"), [(np.ones(4), 12), (CURVE, 10)])
def test_an_order_that_is_to_be_left_is_best_first_everywhere(curve, count, tmp_path, posbias):
    """Of a flat curve, and of one that differs in too few samples for a claim."""
    run = saved(tmp_path / "run", curve, count)
    placed = pb.place(RELEVANCE, run)
    assert (placed.advice, placed.order) == ("leave the order", (0, 1, 2, 3))
    assert placed.estimated == ((0, 1, 2, 3) if count == 12 else (3, 2, 0, 1))
    assert placed_order(RELEVANCE, run) == placed_order([None] * 4, run) == (0, 1, 2, 3)
    assert placed_order([38.0, 45.0, 41.0, -1.0], run) == (1, 2, 0, 3)
    told = json.loads(posbias("place", "--run", run, "--scores", "0.6,0.3,0.06,0.04", "--json").stdout)
    assert told["scalars"]["order"] == [0, 1, 2, 3]
    assert told["verdict"][:2] == [
        "Leave the order: none is shown to be better than both best first and shuffled ones.",
        "That is best first (0 is the first given): 0,1,2,3.",
    ]
