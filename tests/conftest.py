"""Every jaxtyping annotation of the package is checked by beartype while tests run."""

import os
import sys
import types

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from beartype import BeartypeConf, beartype
from hypothesis import settings
from jaxtyping import install_import_hook

# Whole numbers are welcome where floats are asked for (PEP 484's numeric tower), as they are without the checker.
typecheck = types.ModuleType("posbias_typecheck")
typecheck.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # type: ignore[attr-defined]
sys.modules[typecheck.__name__] = typecheck
install_import_hook("posbias", "posbias_typecheck.check")

# Machines are shared and nothing is timed in tests; the same examples every time, so that a failure is a change's fault.
settings.register_profile("posbias", deadline=None, derandomize=True)
settings.load_profile("posbias")
