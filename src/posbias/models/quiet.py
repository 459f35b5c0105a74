"""Silence while transformers and the hub client load: no logs, no warnings, and no bars unless someone is watching."""

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr


@contextmanager
def quiet(local: bool) -> Iterator[None]:
    """Silence transformers while loading; bars (downloads, GGUF conversion) stay where someone is watching."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    watched = sys.stderr.isatty()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if local or not watched:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), ExitStack() as redirected:
            warnings.simplefilter("ignore")
            if not watched:
                # The GGUF reader's bar asks no setting.
                redirected.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
