"""Verdicts on orders and on rules at turns, simulated: what is not there is said in at most 5 % of runs, and what is
there is found."""

import numpy as np
import pytest
from scipy.stats import binom

import posbias as pb
from conftest import json_lines
from evaluation.replies import Says
from posbias import EvaluateOptions

pytestmark = pytest.mark.slow
RUNS = 300
MOST_FALSE = binom.ppf(0.99, RUNS, 0.05)
"""False verdicts that 99 % of simulations with a rate of 5 % stay below."""


def drawn(chance, right, wrong, seed):
    """Gives an answer with a probability that a prompt decides, and otherwise another."""
    generator = np.random.default_rng(seed)
    return Says(lambda request: right if generator.random() < chance(request) else wrong)


def shares(seed, n, mean):
    """Chances of samples, some easy and some hard."""
    return np.random.default_rng(seed).beta(3 * mean, 3 * (1 - mean), n)


def orders(tmp_path, gain, seed):
    documents = [{"text": f"passage {rank}", "is_gold": rank == 1} for rank in range(4)]
    file = json_lines(
        tmp_path / "retrieved.jsonl", *40 * [{"question": "q", "answers": ["yes"], "documents": documents}]
    )
    chances = shares(seed, 40, 0.5)

    def chance(request):
        turned = request.prompt.index("passage 3") < request.prompt.index("passage 0")
        return chances[int(request.group.rpartition("-")[2])] + turned * gain

    options = EvaluateOptions(count=40, orders=("given", "ends", "reversed", "question_first"))
    return pb.evaluate(drawn(chance, "yes", "no", seed), f"documents(file={file!r})", options=options)


def test_orders_that_are_alike_are_told_apart_in_few_runs_and_others_in_most(tmp_path):
    alike = [orders(tmp_path, 0.0, seed).verdict for seed in range(RUNS)]
    assert sum(said[0].startswith("Take") or len(said) > 1 for said in alike) <= MOST_FALSE
    better = [orders(tmp_path, 0.6, seed).verdict[0] for seed in range(RUNS // 10)]
    assert sum(said.startswith("Take the order reversed") for said in better) >= 0.8 * len(better)


def turns(tmp_path, kept, placed, seed):
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {say: Rule one., check: lower_case}\n- {say: Rule two., check: \"lacks(text='No')\"}\n")
    chances = shares(seed, 20, kept)  # of conversations, of which each has both rules
    names: dict[str, int] = {}

    def chance(request):
        asked = [message["content"] for message in request.prompt if message["role"] == "user"]
        if len(asked) == 1:
            return 1.0
        begin = asked[0].removesuffix("\n\nRule one.").removesuffix("\n\nRule two.")
        conversation = names.setdefault(begin, len(names))
        return chances[conversation % 20] + placed * ("Rule" in asked[-1])

    options = EvaluateOptions(count=40, turns=(2, 3), threshold=0.8, score=False)
    task = f"rules(file={str(rules)!r}, placements=['system', 'last'])"
    return pb.evaluate(drawn(chance, "yes", "No", seed), task, options=options).verdict


def test_rules_are_lost_and_mended_in_the_verdict_as_in_truth(tmp_path):
    at_threshold = [turns(tmp_path, 0.8, 0.0, seed) for seed in range(RUNS)]
    assert sum(said[0].startswith(("Lost", "Not kept")) for said in at_threshold) <= MOST_FALSE
    assert sum(said[0].startswith("Kept") for said in at_threshold) <= MOST_FALSE
    assert sum("Cheapest" in said[1] for said in at_threshold) <= MOST_FALSE
    lost = [turns(tmp_path, 0.4, 0.5, seed) for seed in range(RUNS // 10)]
    assert sum(said[0].startswith(("Lost", "Not kept")) for said in lost) >= 0.8 * len(lost)
    assert sum(said[1].startswith("Cheapest place that keeps it better: behind") for said in lost) >= 0.8 * len(lost)
