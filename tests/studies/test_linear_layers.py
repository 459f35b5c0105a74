"""The shipped study of linear layers: its page and the page of results say what its sheet says."""

import csv
from pathlib import Path

STUDY = Path(__file__).parents[2] / "studies" / "linear_layers"
PAGE = STUDY / "README.md"


def lines():
    with (STUDY / "places.csv").open(newline="") as sheet:
        return list(csv.DictReader(sheet))


def test_the_pages_say_of_two_attention_layers_in_a_row_what_the_sheet_says():
    at_birth = [line for line in lines() if line["larger"] == "1"]
    of = {(line["family"], line["attention in"]): line for line in at_birth}

    def ends(places, name, *, but=()):
        values = [
            float(line[name]) for line in at_birth if line["attention in"] == places and line["family"] not in but
        ]
        return " to ".join(f"{end(values):.3f}"[1:] for end in (min, max))

    page, results = (" ".join(path.read_text().split()) for path in (PAGE, STUDY.parent / "README.md"))
    assert f"Mean field W1 {ends('0 1', 'mean field')}." in results
    assert f"{ends('none', 'power rollout')} without attention" in results
    assert f"{ends('0', 'power rollout', but=['olmo_hybrid'])} with one early attention layer" in results
    row = f"{ends('0 1', 'power rollout')} with two in a row (flat line {ends('0 1', 'flat')})"
    assert row in results
    assert float(of["bamba", "0 1"]["less flat, low"]) > 0 > float(of["bamba", "0 3"]["less flat, high"])
    assert float(of["lfm2", "0 1"]["less flat, high"]) > 0
    for key, told in ((("bamba", "0 1"), ".168 [.158, .177]"), (("bamba", "0 3"), ".011 [.000, .026]")):
        values = [float(of[key][f"power rollout{end}"]) for end in ("", ", low", ", high")]
        assert "{:.3f} [{:.3f}, {:.3f}]".format(*values).replace("0.", ".") == told
        assert told in page


def test_larger_matrices_leave_four_of_seven_no_nearer_than_the_flat_line():
    larger = {line["family"]: line for line in lines() if line["larger"] == "4"}
    nearer = [family for family, line in larger.items() if float(line["less flat, high"]) < 0]
    assert (len(larger), nearer) == (7, ["qwen3_5_text", "recurrent_gemma", "granitemoehybrid"])
    page = " ".join(PAGE.read_text().split())
    for family, name in {"lfm2": "LFM 2", "olmo_hybrid": "OLMo Hybrid", "bamba": "Bamba", "jamba": "Jamba"}.items():
        power, flat = (f"{float(larger[family][key]):.3f}"[1:] for key in ("power rollout", "flat"))
        assert f"{name} ({power}, {flat})" in page
