"""Functions and files of posbias that two verbs enter on a tiny model: `python tests/entered.py [TWO METHODS]`.

All modules are imported before, so that what is counted is a call's own; comprehensions are no functions.
"""

import pkgutil
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType

import posbias as pb
from conftest import save_byte_tokenizer, save_tiny_llama

HOME = Path(pb.__file__).parent


def entered(call: Callable[[], object]) -> set[CodeType]:
    """The functions below `HOME` that a call enters."""
    found: set[CodeType] = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    call()
    sys.setprofile(None)
    return {code for code in found if code.co_filename.startswith(f"{HOME}/") and code.co_name[-5:] not in NO_FUNCTION}


NO_FUNCTION = ("comp>", "expr>", "dule>")
for module in pkgutil.walk_packages([str(HOME)], "posbias."):
    if not module.name.endswith(("__main__", ".app", ".inspect")):  # programs, and what needs an extra
        import_module(module.name)
methods, task, asked = [*sys.argv[1:], "context_bias,temperature"][0], "key_value(pairs=6)", pb.EvaluateOptions(count=3)
with tempfile.TemporaryDirectory() as folder:
    save_tiny_llama(Path(folder), max_positions=2048)
    save_byte_tokenizer(Path(folder))
    options = pb.MitigateOptions(methods, calibration=4, evaluation=asked, documents=2)
    for call in (lambda: pb.evaluate(folder, task, options=asked), lambda: pb.mitigate(folder, task, options=options)):
        codes = entered(call)
        print(f"{len(codes)} functions in {len({code.co_filename for code in codes})} files")
