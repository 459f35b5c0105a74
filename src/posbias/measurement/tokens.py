"""A text with the influence of every token as a heat map: how many times the uniform share 1 / N each one has."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.display.showing import Series, Showing, Shown

SATURATED = 8.0
"""Times the uniform share, or a fraction of it, at which a colour is full."""
MORE, LESS = "213,94,0", "0,114,178"
"""Red, green and blue of tokens above and below the uniform share, told apart by the colour-blind."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenMap(Showing):
    """The tokens of one prompt with their measured influence, beside a theory's if one is given."""

    prompt: int
    texts: tuple[str, ...]
    """Text of every token as it stands in the prompt; "#7" for token 7 of a model without a tokenizer."""
    series: tuple[Series, ...]
    """The measurement, then the theory."""
    errors: Float64[np.ndarray, "n_positions"] | None = None
    """Standard error of every token's measured share from random probes, if these were drawn."""

    def shown(self) -> Shown:
        """The curves of the one prompt; without intervals, which are over prompts."""
        names = " beside ".join(series.name for series in self.series)
        return Shown(f"prompt {self.prompt}, {len(self.texts)} tokens: {names}", self.series)

    def _repr_html_(self) -> str:
        scale = (
            f"Orange: above the uniform share 1/{len(self.texts)}, blue: below; full colour at {SATURATED:g} times or "
            f"1/{SATURATED:g} of it. Point at a token for its number."
        )
        texts = map(self._text_of, self.series)
        columns = "".join(f'<div style="flex:1;min-width:18em">{text}</div>' for text in texts)
        row = f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{columns}</div>'
        return f"<div><p><b>{escape(self.shown().title)}</b><br>{scale}</p>{row}</div>"

    def _text_of(self, series: Series) -> str:
        spans = []
        for place, (text, times) in enumerate(zip(self.texts, series.values * len(self.texts), strict=True)):
            hint = f"position {place}: {times:.3g} x uniform"
            if self.errors is not None and series is self.series[0]:
                hint += f", standard error of the probes {self.errors[place] * len(self.texts):.2g}"
            spans.append(f'<span style="background:{_colour(float(times))}" title="{hint}">{escape(text)}</span>')
        style = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"
        return f'<p>{escape(series.name)}</p><div style="{style}">{"".join(spans)}</div>'


def token_texts(token_ids: Int64[np.ndarray, "n_positions"], tokenizer: Any) -> tuple[str, ...]:
    """The text that each token adds, spaces included; bytes that are no whole character show as "�"."""
    ids: Sequence[int] = token_ids.tolist()
    if tokenizer is None:
        return tuple(f"#{token} " for token in ids)

    def decoded(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    pairs = itertools.pairwise(ids)
    return (decoded(ids[:1]), *(decoded(pair)[len(decoded(pair[:1])) :] or decoded(pair[1:]) for pair in pairs))


def _colour(times: float) -> str:
    """The colour of a share that is `times` the uniform one."""
    strength = 1.0 if times <= 0 else min(1.0, abs(math.log(times)) / math.log(SATURATED))
    return f"rgba({MORE if times > 1 else LESS},{strength:.2f})"
