"""Old records of `reproduce` become names and numbers: statements, findings' sentences and the tables made of them."""
import re, sys
from dataclasses import fields
from pathlib import Path
import numpy as np
from scipy.special import stdtrit
from posbias.papers import PAPERS
from posbias.papers.findings import STATEMENTS
from posbias.papers.liu2026.published import CONFIGURATIONS, published_losses
from posbias.papers.liu2026.statements import NEAR
from posbias.runs.records import read_record

def with_error(test):
    kept = {name: test[name] for name in ("value", "low", "high")}
    n = test["n_seeds"]
    # Seeds that all agree have today's error: as if one in n showed nothing.
    error = 0.0 if test["low"] is None or n < 2 else abs(test["value"]) / n if test["low"] == test["high"] else (test["high"] - test["low"]) / 2 / float(stdtrit(n - 1, 0.975))
    from posbias.papers.findings import Difference
    again = Difference.of_record({**kept, "error": error, "n_seeds": n})
    return again.as_record()

def migrated(record, paper):
    s = record.scalars
    names = {STATEMENTS[name].reported: name for name in STATEMENTS}
    said = s["statements"]
    published = int(re.match(r"Of (\d+) published findings", next(t for t in said if t.startswith("Of "))).group(1))
    rows = []
    configurations = {str(c): c for c in CONFIGURATIONS}
    for number, row in enumerate(s["rows"]):
        if row["sort"] == "finding":
            facts, name = {}, names.get(row["reported"])
            if name is None:
                assert row["where"].startswith("Numbers, "), row
                name, configuration = "copy/losses", configurations[row["where"].removeprefix("Numbers, ")]
                values, losses = published_losses(configuration), record.arrays[f"{configuration}/loss"]
                mean, best = losses.mean(axis=0), losses.min(axis=0)
                facts = {"published": values.tolist(), "mean": mean.tolist(), "near": int(np.sum(np.abs(mean - values) <= NEAR)),
                         "best": best.tolist(), "near_best": int(np.sum(np.abs(best - values) <= NEAR)), "count": len(values),
                         "difference": float(np.abs(mean - values).mean())}
            tests = {case: with_error(test) for case, test in row["tests"].items()}
            rows.append({"sort": "finding", "where": row["where"], "name": name, "verdict": row["verdict"], "facts": facts,
                         "published": number < published, "together": row["together"], "tests": tests})
        else:
            rows.append({**row, **{n: row[n] and with_error(row[n]) for n in ("correlation", "slope")}})
    facts = {}
    if paper.startswith("icl"):
        found = re.search(r"is ([\d.]+) to ([\d.]+) \(mean ([\d.]+)\) over (\d+) members;.* and (\d+) members", said[0])
        least, most, mean, members, above = found.groups()
        facts = {"steps": record.resolved["steps"], "batch": record.resolved["batch"],
                 "accuracy": {"least": float(least), "mean": float(mean), "most": float(most), "members": int(members), "above": int(above)}}
    assert not any("did not finish" in t for t in said)
    facts |= {"members": 540 if paper.startswith("icl") else 420, "lost": []}
    before = []
    for text in said:
        if m := re.match(r"Trained before, with posbias ([^,]+), commit ([^,]+), ([\d-]+): (.*); read back here\.", text):
            version, commit, created, studies = m.groups()
            before += [{"study": name, "posbias": version, "commit": None if commit == "unknown" else commit, "created": created} for name in studies.split(", ")]
    if before: facts["trained_before"] = before
    ours = ("Published findings", "Quantities over seeds", "Closing the loop")
    tables = [t for t in s["tables"] if not t["title"].startswith(ours)]
    record.scalars = {"experiment": paper, "rows": rows, "facts": facts, "tables": tables, "figures": s["figures"]}
    return record

if __name__ == "__main__":
    for run, paper in {"position-copy": "position-copy-liu2026", "icl": "icl-2502.01951"}.items():
        directory = Path("studies/experiments") / run
        record = read_record(directory)
        old = record.scalars
        new = migrated(record, paper)
        for row, was in zip(new.scalars["rows"], old["rows"], strict=True):
            for part in ("tests",) if row["sort"] == "finding" else ("correlation", "slope"):
                a, b = row[part], was[part]
                pairs = [(a[c], b[c]) for c in a] if part == "tests" else ([(a, b)] if a else [])
                for x, y in pairs:
                    for e in ("value", "low", "high"):
                        if y["low"] == y["high"]: continue
                        assert x[e] == y[e] or abs(x[e] - y[e]) < 1e-9 * max(1, abs(y[e])), (run, row, e, x, y)
        new.save(directory)
