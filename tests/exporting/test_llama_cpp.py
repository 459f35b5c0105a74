"""An exported GGUF adapter in llama.cpp itself: the next token is as probable as under the method here."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import posbias as pb
from gguf_inputs import save_gguf
from posbias.mitigation.fitting import Fitted
from tiny_families import random_adapter, shaken_model

PACKAGE = "node-llama-cpp@3.22.1"
"""Brings llama.cpp as a prebuilt library, through npm."""
SCRIPT = """
import {readFileSync} from "node:fs";
import {getLlama} from "node-llama-cpp";
const [modelPath, adapter, prompts, begin] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true});
const model = await llama.loadModel({modelPath});
const lora = adapter === "none" ? undefined : {adapters: [{filePath: adapter, scale: 1}]};
const context = await model.createContext({contextSize: 64, threads: 1, lora});
const plain = (await model.createContext({contextSize: 64, threads: 1})).getSequence();
const sequence = context.getSequence();
for (const tokens of JSON.parse(prompts)) {
    await sequence.clearHistory();
    if (begin > 0) {  // what the model itself has cached, as llama-server has it before the invocation
        await plain.clearHistory();
        await plain.evaluateWithoutGeneratingNewTokens(tokens.slice(0, begin));
        await plain.saveStateToFile(`${modelPath}.state`);
        await sequence.loadStateFromFile(`${modelPath}.state`, {acceptRisk: true});
    }
    const told = sequence.evaluateWithMetadata(tokens.slice(begin), {probabilities: true}, {temperature: 0});
    console.log(JSON.stringify(Array.from((await told.next()).value.probabilities.entries())));
}
await llama.dispose();
"""
PROMPTS = [[5, 9, 3, 20, 11, 7], [8, 8, 30, 2]]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which llama.cpp can be called; skipped without npm or its registry."""
    directory = Path(os.environ.get("POSBIAS_NODE", tmp_path_factory.mktemp("node")))
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    if not (directory / "node_modules" / "node-llama-cpp").is_dir():
        command = ["npm", "install", "--silent", "--prefix", str(directory), PACKAGE]
        if subprocess.run(command, capture_output=True, timeout=300).returncode:
            pytest.skip(f"{PACKAGE} cannot be installed")
    (directory / "probabilities.mjs").write_text(SCRIPT)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["q,k", "all"])
@pytest.mark.parametrize(("kind", "begin"), [("F32", 0), ("Q8_0", 0), ("F32", 2)])
def test_llama_cpp_gives_the_probabilities_of_the_method(
    targets: str, kind: str, begin: int, node: Path, tmp_path: Path
) -> None:
    """On a quantised base no further off than without the adapter, but for how the two add up.

    From a token on, it goes on from what the base model has cached.
    """
    model = shaken_model("llama", dtype=torch.float32)
    method = random_adapter(model, f"adapter(rank=2, targets={targets!r}, invocation={[1, 1] if begin else []})")
    pb.export(Fitted(method, {}), tmp_path / "out", model=model, gguf=True)
    save_gguf(tmp_path / "base.gguf", model.network, kind=gguf.GGMLQuantizationType[kind])

    def served(adapter: str) -> np.ndarray:
        command = ["node", "probabilities.mjs", str(tmp_path / "base.gguf"), adapter, json.dumps(PROMPTS), str(begin)]
        done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        rows = [dict(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[[")]
        return np.array([[row[token] for token in sorted(row)] for row in rows])

    def here() -> np.ndarray:
        with torch.no_grad():
            return np.stack(
                [model.network(torch.tensor([tokens])).logits[0, -1].softmax(-1).numpy() for tokens in PROMPTS]
            )

    unchanged = here()
    noise = float(np.abs(served("none") - unchanged).max())
    assert noise < {"F32": 1e-3, "Q8_0": 0.02}[kind]
    with pb.mitigated(model, method, passages=[(0, begin)] if begin else []):
        changed = here()
    assert np.abs(changed - unchanged).max() > 0.01
    told = served(str(tmp_path / "out" / "adapter.gguf"))
    np.testing.assert_allclose(told, changed, rtol=0, atol=max(1e-3, 1.5 * noise))
