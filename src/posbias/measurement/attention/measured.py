"""The result of `attention`: the statistics, which show themselves.

The picture is of attention distance by layer, beside that of even attention (docs/theory, section 6).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.display.showing import Series, Showing, Shown
from posbias.measurement.attention.statistics import AttentionStatistics
from posbias.statistics import Interval, mean_of


@dataclass(frozen=True, eq=False, repr=False)
class MeasuredAttention(Showing, AttentionStatistics):
    """A model's attention over a set of prompts, as it shows itself."""

    def shown(self) -> Shown:
        """Attention distance of every layer beside even attention's; the means over the whole model, with intervals."""
        distance = _overall(self.distance.per_prompt, most=np.inf)
        even = float(self.even_distance.mean())
        title = (
            f"{self.count} prompts of {self.n_positions} tokens: attention looks back {distance.value:.1f} positions "
            f"on average, even attention {even:.1f}"
        )
        series = (
            Series("mean over heads", self.distance.by_layer, self.distance.low, self.distance.high),
            Series("even attention", self.even_distance),
        )
        layers = np.arange(len(self.even_distance))
        return Shown(title, series, "distance", "layer", layers, unit="positions", facts=self._facts(distance, even))

    def _facts(self, distance: Interval, even: float) -> Mapping[str, str]:
        facts = {
            "attention distance, positions": f"{distance.text('.1f')}; even attention {even:.1f}",
            "entropy, of the largest possible": _overall(self.entropy.per_prompt).text(),
        }
        for number, threshold in enumerate(self.sink_thresholds):
            share = _overall(self.sinks.per_prompt[:, number, :1]).text(".1f", scale=100, unit=" %")
            facts[f"queries that give position 0 more than {threshold:g}"] = share
        facts["attention's share of a layer's output (mixing)"] = _overall(self.mixing.tokens.per_prompt).text()
        left_out = {"left out": "; ".join(self.left_out)} if self.left_out else {}
        return facts | left_out | {f"caveat {number}": text for number, text in enumerate(self.caveats, 1)}


def _overall(per_prompt: Float64[np.ndarray, "count ..."], *, most: float = 1.0) -> Interval:
    """Mean over prompts of the mean over everything else, with its interval over prompts; by default of a share."""
    return mean_of(per_prompt.reshape(len(per_prompt), -1).mean(axis=1)).interval(least=0.0, most=most)
