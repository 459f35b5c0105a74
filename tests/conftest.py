"""Every jaxtyping annotation of the package is checked by beartype while tests run."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

install_import_hook("posbias", "beartype.beartype")
