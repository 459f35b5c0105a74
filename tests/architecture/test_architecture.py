"""The architecture resolves what a user writes to one value per layer and head, or refuses it in one line."""

import numpy as np
import pytest

from posbias import Architecture, UsageError
from posbias.architecture import ENCODINGS, MASKS, Alibi, Causal, SlidingWindow, published_alibi_slopes


def test_variants_and_literals_are_the_same():
    written = Architecture(depth=2, heads=2, mask="sliding_window(width=4)", encoding="alibi(slopes=[0.5, 0.25])")
    built = Architecture(depth=2, heads=2, mask=SlidingWindow(width=4), encoding=Alibi(slopes=(0.5, 0.25)))
    assert written.describe() == built.describe()
    assert written.head_groups[0][0].mask == SlidingWindow(4)
    np.testing.assert_array_equal(written.head_groups[0][0].linear_slopes(), [0.5, 0.25])


SPELLED = {
    MASKS: ["causal", "sliding_window(width=64)", "prefix(length=3)", "full"],
    ENCODINGS: ["none", "alibi", "alibi(slopes=[0.5, 0.25])", "decay(rate=0.8)", "rope(head_dim=8)"],
}


def test_spelling_round_trips():
    for registry, literals in SPELLED.items():
        assert [str(registry.parse(literal)) for literal in literals] == literals


def test_mixing_as_number_and_list():
    np.testing.assert_array_equal(Architecture(depth=3, mixing=0.1).layer_mixing, [0.1] * 3)
    np.testing.assert_array_equal(Architecture(depth=3, mixing=[0, 0.5, 1]).layer_mixing, [0, 0.5, 1])


def test_content_as_number_layers_and_heads():
    assert Architecture(depth=2, heads=3, content=1.5).layer_content.tolist() == [[1.5] * 3] * 2
    assert Architecture(depth=2, heads=3, content=[1, 2]).layer_content.tolist() == [[1] * 3, [2] * 3]
    table = [[1, 2, 3], [4, 5, 6]]
    assert Architecture(depth=2, heads=3, content=table).layer_content.tolist() == table


def test_hybrid_stacks_group_heads_by_mask_and_encoding():
    hybrid = Architecture(
        depth=2, heads=3, mask=["causal", ["causal", "sliding_window(2)", "causal"]], encoding="alibi"
    )
    assert [len(groups) for groups in hybrid.head_groups] == [1, 2]
    wide, narrow = hybrid.head_groups[1]
    assert wide.heads.tolist() == [0, 2]
    assert narrow.heads.tolist() == [1]
    assert wide.mask == Causal()
    np.testing.assert_array_equal(wide.linear_slopes(), np.array(published_alibi_slopes(3))[[0, 2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "depth must be a whole number >= 1"),
        ({"depth": 2, "heads": 0}, "heads must be a whole number"),
        ({"depth": 2, "mask": "casual"}, "unknown mask 'casual'; known: causal, full, prefix, sliding_window"),
        ({"depth": 2, "mask": "sliding_window"}, "parameters of sliding_window: width"),
        ({"depth": 2, "mask": "sliding_window(width=0)"}, "width must be a whole number >= 1"),
        ({"depth": 2, "mask": "__import__('os').system('x')"}, "is not a name or a literal call"),
        ({"depth": 2, "mask": [Alibi(), Alibi()]}, "Alibi.* is not a mask"),
        ({"depth": 2, "encoding": "decay(rate=1.5)"}, "rate must be a number >= 1e-300 and <= 1, got 1.5"),
        ({"depth": 2, "encoding": "decay(speed=1)"}, "parameters of decay: rate"),
        ({"depth": 2, "encoding": "recurrent(slopes=[1])"}, r"recurrent left posbias after 0.1.0: alibi\(slopes="),
        ({"depth": 2, "heads": 3, "encoding": "alibi(slopes=[1, 2])"}, "2 slopes given for 3 heads"),
        (
            {"depth": 2, "heads": 1, "encoding": "alibi(slopes=[-1])"},
            "slopes must be a list, each a number >= 0 and <= 700.0",
        ),
        ({"depth": 2, "encoding": "rope(head_dim=7)"}, "head_dim must be an even number"),
        ({"depth": 2, "mixing": 1.5}, r"mixing must lie in \[0, 1\], got 1.5 at layer 0"),
        ({"depth": 2, "mixing": [0.1, float("nan")]}, "mixing must be a finite number"),
        ({"depth": 2, "mixing": [0.1] * 3}, r"mixing has shape \[3\]; give a number, 2 values \(layers\)$"),
        ({"depth": 2, "mixing": "warp(speed=9)"}, "mixing 'warp.speed=9.' is not a number or a list"),
        ({"depth": 2, "mask": ["causal"] * 3}, "3 values given for 2 layers"),
        ({"depth": 2, "heads": 2, "content": [[1, 2, 3], [1, 2, 3]]}, "content has shape"),
        ({"depth": 2, "content": float("inf")}, "content must be a finite number"),
    ],
)
def test_bad_input_is_named_in_one_line(arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        Architecture(**arguments)
    assert "\n" not in str(caught.value)


def test_published_slopes_are_those_of_the_paper_for_any_head_count():
    np.testing.assert_allclose(published_alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    twelve = published_alibi_slopes(12)
    np.testing.assert_allclose(twelve[:8], published_alibi_slopes(8))
    np.testing.assert_allclose(twelve[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
