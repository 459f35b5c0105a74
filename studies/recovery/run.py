"""The demo model and a copy of it in 4 bits, by accuracy and by recovery on the same samples: README.md's tables.

Run it as `python studies/recovery/run.py`. The copy is made here, by rounding to the nearest of 15 steps in groups of
32 weights of a row, of every linear layer but the head; it is saved in a directory that is removed at the end.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import posbias as pb
from posbias.evaluation.curve import position_means
from posbias.evaluation.levels import MEAN
from posbias.models.loading import fetch_demo

GROUP, LARGEST = 32, 7
TASKS = {
    "documents(documents=6)": pb.EvaluateOptions(count=32, positions=(0, 2, 3, 5), max_tokens=40, recovery=True),
    "needle(tokens=384, depths=3)": pb.EvaluateOptions(count=32, generate=False, recovery=True),
}


def rounded(weights: torch.Tensor) -> torch.Tensor:
    """Weights [out in] on the grid of their group, whose largest is a step of the grid."""
    groups = weights.reshape(len(weights), -1, GROUP)
    step = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return ((groups / step).round() * step).reshape(weights.shape)


def save_rounded(directory: Path) -> None:
    """The demo model in 4 bits, as any other checkpoint."""
    source = fetch_demo()
    network = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.copy_(rounded(layer.weight))
    network.save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "4-bit"
        save_rounded(copy)
        for task, options in TASKS.items():
            found = pb.evaluate(["demo", str(copy)], task, options=options)
            print(f"\n{task}, {found.n_samples} samples at {found.positions}")
            for name, run in found.evaluations.items():
                print(f"{name}: {run.withheld or 'answers can be judged, or there are none'}")
                for measure, table in {**run.measures, "right": run.tables["correct"]}.items():
                    print(f"{name}, {measure}: {' | '.join(mean.text('.2f') for mean in position_means(table))}")
                gain, each = run.recovery.gain.text(".1f"), [share.text(".2f") for share in run.recovery.by_position]
                print(f"{name}, recovery of {gain} nats: {' | '.join(each)}")
            (_, other) = found.compared
            changes = [other.changes[MEAN].value, *(contrast.value for contrast in other.differences)]
            print(f"{found.measure} less, mean and each: {' | '.join(change.text('+.2f') for change in changes)}")
            print(f"recovery less, mean and each: {' | '.join(less.text('+.2f') for less in other.recovery)}")
            print(*found.verdict, sep="\n", flush=True)


if __name__ == "__main__":
    main()
