"""What an audit takes beside its floor: the bare forward and backward passes of its prompts, timed in the same process.

`OMP_NUM_THREADS=1 python benchmarks/audit/run.py` audits the demo model as `make audit` does, in one process.
Behind every third unit (a prompt, or an initialisation with its prompt) the floor of the same prompt is run: one
forward pass, and one backward pass to the embeddings for every covector. Processor seconds are compared, those of the
process from its start; the floor's own are taken off.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

import posbias as pb
from posbias.runs.engines import Arrays, Local, Workload

PASSES = ("forward", "backward")
EVERY = 3
"""Units between two floors."""


@dataclass(frozen=True)
class Interleaved(Local):
    """This process, which runs the floor of some units behind them."""

    units: list[float] = field(default_factory=list)
    floors: list[dict[str, float]] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    """Processor seconds of each unit, of each floor's passes, and seconds of the clock for the floor."""

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[tuple[int, Arrays]]:
        """As the local engine."""
        for unit in units:
            begun = time.process_time()
            (finished,) = super().run(workload, [unit], prepared=prepared)
            self.units.append(time.process_time() - begun)
            if unit % EVERY == 0:
                begun = time.perf_counter()
                self.floors.append(floor(prepared, workload, unit))
                self.waited.append(time.perf_counter() - begun)
            yield finished


def floor(model: Any, workload: Any, unit: int) -> dict[str, float]:
    """Processor seconds of the passes that the kinds of a unit take at least."""
    token_ids = workload.token_ids[workload.units[unit].prompt]
    covectors = sum(getattr(kind, "probes", 1) for kind in workload.kinds)
    begun = time.process_time()
    inputs = model.embed(model.token_tensor([token_ids.tolist()])).detach().requires_grad_()
    logits = model.network(inputs_embeds=inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
    forward = time.process_time()
    for left in reversed(range(covectors)):
        torch.autograd.grad(logits[left], inputs, retain_graph=left > 0)
    return dict(zip(PASSES, (forward - begun, time.process_time() - forward), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--initialisations", type=int, default=8)
    given = parser.parse_args()
    engine = Interleaved()
    options = pb.AuditOptions(engine=engine, initialisations=given.initialisations)
    with tempfile.TemporaryDirectory() as out:
        pb.audit(given.model, n_positions=given.length, prompts=given.count, out=out, options=options)
    processor, clock = time.process_time(), time.time() - psutil.Process().create_time()
    whole = processor - sum(sum(each.values()) for each in engine.floors)
    passes = {
        name: len(engine.units) * sum(each[name] for each in engine.floors) / len(engine.floors) for name in PASSES
    }
    least, trained = sum(passes.values()), sum(engine.units[: given.count])
    born = sum(engine.units[given.count :])
    rows = {
        "floor": least,
        **{f"  {name} passes": seconds for name, seconds in passes.items()},
        "audit": whole,
        f"  {given.count} prompts, as trained": trained,
        f"  {given.initialisations} initialisations": born,
        "  imports, loading, estimate, report": whole - trained - born,
    }
    print(f"{torch.get_num_threads()} threads; the audit by the clock: {clock - sum(engine.waited):.0f} s")
    print(f"{'processor seconds':<40} {'s':>7} {'x floor':>8}")
    for name, seconds in rows.items():
        print(f"{name:<40} {seconds:>7.1f} {seconds / least:>8.2f}")


if __name__ == "__main__":
    main()
