"""`posbias explore`: the residual rollout of architectures on sliders, an app of marimo in the browser."""

from typing import Annotated

from annotated_types import Interval

from posbias.errors import UsageError


def explore(*, port: Annotated[int, Interval(ge=1, le=65535)] | None = None, headless: bool = False) -> None:
    """Explore architectures in the browser.

    Sliders set what mixes positions; a target is designed for. Needs `pip install 'posbias[explore]'`.

    Args:
        port: Port on this machine; a free one by default.
        headless: Open no browser; print the address alone.

    Example: `posbias explore` · on a machine without a browser: `posbias explore --port 2718 --headless`
    """
    import os
    import sys
    from importlib.resources import files
    from importlib.util import find_spec

    if find_spec("marimo") is None:
        raise UsageError("explore is an app of marimo, which is not installed: pip install 'posbias[explore]'")
    flags = [*(["--port", str(port)] if port else []), *(["--headless"] if headless else [])]
    app = str(files("posbias.explorer") / "app.py")
    os.execv(sys.executable, [sys.executable, "-m", "marimo", "run", app, *flags])  # its signals are marimo's
