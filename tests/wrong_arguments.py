"""Public functions called with arguments of wrong classes; `wrong_arguments.py MODEL` prints what is not refused,
then how many wrong arguments were tried.

Run in an interpreter of its own, without the type checks that tests switch on: as a user would meet it.
"""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

import posbias as pb
from posbias.models.model import Model

OF_PACKAGES = {
    "auditing.run": "audit_behaviour",
    "evaluation.correlate": "BehaviourPlan correlate_pairs",
    "evaluation.options": "LocalOptions",
    "evaluation.responders": "ServerOptions",
    "interventions": "intervened",
    "models.networks": "reinitialise",
    "prompts.prompts": "PromptSource Prompts",
    "tasks.synthetic": "CuedCopy KeyValueRetrieval PositionCopy",
    "theory.power_rollout": "attention_rollouts",
    "training.members": "Member TrainingSchedule",
    "training.study": "Study load_study",
}
"""What users call that is not at the top level."""
NOT_CALLED = {"__version__", "architecture", "Record", "RunError", "UsageError"}
"""One module, errors, and what no user makes."""
NAMED = (str, Path, Model)
TAKES_MODELS = dict.fromkeys(("attention", "decompose", "measure", "predict"), NAMED)
RIGHT = {
    "audit": NAMED,
    **TAKES_MODELS,
    "LocalResponder": (str, Path),
    "evaluate": (str, Path, Model),
    "load_model": str,
    "mitigate": NAMED,
    "compare": (*NAMED, pb.Profile, pb.Record),
}
"""Right first arguments, which are not tried: what they are right for would go on for long."""
ALONE = RIGHT.keys() - {"evaluate", "LocalResponder", *TAKES_MODELS}
"""Functions of which no other argument is tried: `attempts` knows a right first one for them."""


def wrong_values(model, prompts):
    profile = pb.Profile.uniform(4)
    record = pb.predict(pb.Architecture(depth=1), 4).record
    return ([1, 2], [[1, 2], [3, 4]], np.array([[1, 2]]), torch.tensor([[1, 2]]), "demo", ["a", "b"], None, 7, 1.5,
            {"a": 1}, Path("nowhere"), object(), model, prompts, profile, record)  # fmt: skip


def public():
    found = {name: getattr(pb, name) for name in {*dir(pb)} - NOT_CALLED}
    for package, names in OF_PACKAGES.items():
        found |= {name: getattr(import_module(f"posbias.{package}"), name) for name in names.split()}
    return found


def attempts(model):
    """(name, function, parameter, value, all arguments) of every call."""
    prompts = pb.load_prompts("default", model, n_positions=12, count=2)
    architecture, profile = pb.Architecture(depth=2), pb.Profile.uniform(12)
    values = wrong_values(model, prompts)
    known = {"model": model, "prompts": prompts, "subject": architecture, "n_positions": 12, "path": "nowhere",
             "source": "default", "first": profile, "second": profile, "task": "key_value"}  # fmt: skip
    for name, call in sorted(public().items()):
        parameters = inspect.signature(call).parameters.values()
        needed = {entry.name: known.get(entry.name, 1) for entry in parameters if entry.default is entry.empty}
        defaults = {entry.name: entry.default for entry in parameters}
        names = list(defaults)
        for parameter in names[: 1 if name in ALONE else None]:
            for value in values:
                if value is known.get(parameter) or (value is None and defaults[parameter] is None):
                    continue  # right, and would be computed
                if parameter != names[0] or not isinstance(value, RIGHT.get(name, ())):
                    yield name, call, parameter, value, {**needed, parameter: value}


def main(source):
    tried = 0
    for name, call, parameter, value, arguments in attempts(pb.load_model(source)):
        tried += 1
        shown = f"{name}({parameter}={type(value).__name__})"
        try:
            call(**arguments)
        except (pb.UsageError, pb.RunError) as error:
            if "\n" in str(error):
                print(f"{shown}: several lines: {error}")
        except Exception as error:
            print(f"{shown}: {type(error).__name__}: {error}")
    print(tried)


if __name__ == "__main__":
    main(sys.argv[1])
