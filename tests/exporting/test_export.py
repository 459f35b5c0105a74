"""What is exported computes what the method does here, wherever it is loaded; what cannot be exported is refused."""

import contextlib
import json
import shlex
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

import posbias as pb
from posbias.exporting import serving
from posbias.mitigation.fitting import Fitted
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import read_recipe, write_recipe
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.tasks.language import KeyValue
from tiny_families import VOCABULARY, random_adapter, shaken_model

TOKENS = torch.arange(3, 15)[None] % VOCABULARY
SERVED = {"rtol": 0, "atol": 1e-4}
"""In float32."""
PEFT_ASKS = "ignore:`is_gradient_checkpointing` is deprecated"
OTHER = "adapter(rank=2, targets='v')"
CASES = [
    *(("llama", targets) for targets in ("q,k", "v,o", "mlp", "all")),
    *(
        (family, "q,k")
        for family in ("falcon", "falcon-new", "gpt_neox", "phi3", "bloom", "gpt2", "mixtral", "gemma3_text")
    ),
    *((family, "all") for family in ("gpt2", "phi3", "opt", "qwen3", "gemma4_text")),
]


def logits(network):
    with torch.no_grad():
        return network(TOKENS).logits


def under(model, method):
    with pb.mitigated(model, method):
        return logits(model.network)


def single(family):
    """A model in float32, and its network anew, as a server would load it."""
    model = shaken_model(family, dtype=torch.float32)
    config = transformers.AutoConfig.for_model(**model.network.config.to_dict())
    fresh = type(model.network)(config).eval()
    fresh.load_state_dict(model.network.state_dict())
    return model, fresh


@pytest.mark.filterwarnings(PEFT_ASKS)
@pytest.mark.parametrize(("family", "targets"), CASES)
def test_a_peft_directory_and_a_checkpoint_give_the_logits_of_the_method(family, targets, tmp_path):
    import peft

    model, fresh = single(family)
    method = random_adapter(model, f"adapter(rank=2, targets={targets!r}, strength=0.6)")
    expected, before = under(model, method), logits(model.network)
    assert float((expected - before).abs().max()) > 0.01
    pb.export(Fitted(method, {}), tmp_path / "adapter", model=model)
    pb.export(Fitted(method, {}), tmp_path / "merged", model=model, merged=True)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(served), expected, **SERVED)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), expected, **SERVED)
    assert torch.equal(logits(model.network), before), "no weight is touched"
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "new").stat().st_mode}, "others may read them as any new file"


@pytest.mark.filterwarnings(PEFT_ASKS)
def test_an_adapter_from_the_question_on_acts_from_there_on_wherever_it_is_loaded(tmp_path):
    import peft

    model, fresh = single("llama")
    method = replace(random_adapter(model, "adapter(rank=2, targets='all')"), invocation=(7, 8))
    with pb.mitigated(model, method, passages=[(0, 4)]):
        expected = logits(model.network)
    assert torch.equal(expected[:, :4], logits(model.network)[:, :4])
    pb.export(Fitted(method, {}), tmp_path / "adapter", model=model, gguf=True)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), expected, **SERVED)
    field = gguf.GGUFReader(tmp_path / "adapter" / "adapter.gguf").fields["adapter.alora.invocation_tokens"]
    assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32]
    assert field.contents() == [8], "llama-server begins one token earlier"
    assert "\n# not for vLLM, which refuses " in (tmp_path / "adapter" / "README.md").read_text()
    with pytest.raises(pb.UsageError, match=r"^export: a merged weight acts on all tokens, this adapter from the que"):
        pb.export(Fitted(method, {}), tmp_path / "merged", model=model, merged=True)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2-uncapped", "gemma3_text"])
def test_a_gguf_adapter_holds_the_updates_in_the_order_of_llama_cpp(family, tmp_path):
    model = shaken_model(family, dtype=torch.float32)
    method = random_adapter(model, "adapter(rank=2, targets='all', strength=0.5)")
    pb.export(Fitted(method, {}), tmp_path / "exported", model=model, gguf=True)
    reader = gguf.GGUFReader(tmp_path / "exported" / "adapter.gguf")
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.type"] == "adapter"
    assert (facts["adapter.type"], facts["adapter.lora.alpha"]) == ("lora", 2.0)
    assert reader.fields["adapter.lora.alpha"].types == [gguf.GGUFValueType.FLOAT32]
    in_pairs = facts["general.architecture"] == "llama"
    assert in_pairs == (family in ("llama", "mistral"))
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    back = LlamaTensorProcessor()
    for path, (update_down, update_up) in method.weight_updates(model).items():
        layer, module = path.split(".")[2], path.rpartition(".")[2]
        down, up = (tensors.pop(f"blk.{layer}.{names[module]}.weight.lora_{side}") for side in "ab")
        if in_pairs and module in ("q_proj", "k_proj"):  # transformers' own reading of GGUF files turns them back
            up = back._reverse_permute_weights(up, 4, 4 if module == "q_proj" else 2)
        np.testing.assert_array_equal(down, update_down)
        np.testing.assert_array_equal(up, update_up)
    assert not tensors


def test_a_checkpoint_keeps_tokenizer_template_and_generation_settings(long_llama, tmp_path):
    model = pb.load_model(str(long_llama), device="cpu")
    model.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model.network.generation_config.repetition_penalty = 1.25
    exported = pb.export(Fitted(random_adapter(model), {}), tmp_path / "merged", model=model, merged=True)
    assert exported.form == "merged"
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(exported.files)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "merged").repetition_penalty == 1.25
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == model.tokenizer.chat_template
    assert tokenizer("A text.").input_ids == model.tokenizer("A text.").input_ids
    for path in (tmp_path / "merged").iterdir():
        assert str(long_llama.parent).encode() not in path.read_bytes(), "no path of this machine"


def test_commands_have_every_name_and_path_in_them():
    def lines(source, directory, rank=4, *, form="adapter", gguf=False):
        return serving(source, directory, rank, form=form, gguf=gguf)[1:-1]

    served = "vllm serve hub/model --enable-lora --max-lora-rank"
    assert lines("hub/model", "adapter", 16)[0] == f"{served} 16 --lora-modules posbias=adapter"
    assert lines("hub/model", "a b", 17)[0] == f"{served} 32 --lora-modules 'posbias=a b'"
    assert lines("demo", "adapter")[0].startswith("posbias models get demo --out demo ")
    assert lines("hub/model", "a b", form="merged") == ["vllm serve 'a b'", "transformers serve 'a b'"]
    advice = "# vLLM and transformers take no adapter of my base.gguf: export it with --merged"
    beside = "llama-server -m 'my base.gguf' --lora 'a b/adapter.gguf'"
    assert lines("my base.gguf", "a b", gguf=True) == [advice, beside]
    converted = "llama-server -m BASE.gguf --lora a/adapter.gguf  # hub/model, converted by llama.cpp"
    assert lines("hub/model", "a", gguf=True)[-1] == converted


@pytest.mark.filterwarnings(PEFT_ASKS)
@pytest.mark.parametrize("invocation", [(), (75, 78)])
def test_the_printed_command_answers_as_the_method_does(long_llama, tmp_path, monkeypatch, capsys, invocation):
    monkeypatch.chdir(long_llama.parent)
    model = pb.load_model(long_llama.name, device="cpu")
    method = replace(random_adapter(model, "adapter(rank=2, targets='all')"), invocation=invocation)
    pb.export(Fitted(method, {}), tmp_path / "adapter", model=model)
    printed = (tmp_path / "adapter" / "README.md").read_text()
    (line,) = [line for line in printed.splitlines() if line.startswith("python -c ")]
    assert "transformers serve" not in printed, "which serves no adapter"
    program = shlex.split(line)[2].replace('"adapter"', repr(str(tmp_path / "adapter"))).replace("PROMPT", "Hello")
    exec(program.replace("max_new_tokens=20", "max_new_tokens=20, do_sample=False"), {})
    told = capsys.readouterr().out.removesuffix("\n")
    asked, answers = model.tokenizer("Hello", return_tensors="pt"), []
    passages = [method.known([], asked.input_ids[0].tolist())[-1]] if invocation else []
    for context in (contextlib.nullcontext(), pb.mitigated(model, method, passages=passages)):
        with context:
            (tokens,) = model.network.generate(**asked, max_new_tokens=20, do_sample=False)
        answers.append(model.tokenizer.decode(tokens))
    assert answers[0] != answers[1] == told


@pytest.fixture
def run(long_llama, tmp_path, posbias):
    """A run that fitted two adapters."""
    directory = tmp_path / "run"
    words = ["--task", "key_value(pairs=2)", "--positions", "0,1", "--count", 6, "--calibration", 4, "--no-generate"]
    words += ["--documents", 0, "--no-short", "--fit", "steps=1, rate=0.1", "--device", "cpu", "--out", directory]
    made = posbias("mitigate", long_llama, *words, "--methods", f"adapter(rank=1), {OTHER}")
    assert made.returncode == 0, made.stderr
    return directory


def test_a_run_is_exported_with_its_verdict_and_what_it_costs(run, long_llama, tmp_path, posbias):
    several = posbias("export", run, "--to", tmp_path / "none")
    assert several.stderr.endswith(f"has no single method to export; in it: adapter(rank=1), {OTHER}; name one\n")
    (recipe,) = run.glob("arms/adapter-rank-1-*/recipe.json")
    fitted = "Fitted to: 4 samples in 8 prompts, in 1 steps"
    told = (
        "On 6 samples of `key_value(pairs=2)` that no fit saw, by log-probability per token: **",
        "- Ordinary text, loss per token: not judged: no windows were asked for",
        "- Seconds per request in that trial: 0.",
    )
    words = {
        "recipe": ([recipe, "--gguf"], ("No verdict at hand: export the run that judged it",)),
        "fitted": ([run, "--method", "adapter(rank=1)"], told),
    }
    for name, (source, parts) in words.items():
        done = posbias("export", *source, "--to", tmp_path / name, "--model", long_llama, "--json")
        assert done.returncode == 0, done.stderr
        card = (tmp_path / name / "README.md").read_text()
        assert all(part in card for part in (*parts, fitted)), card
    assert (tmp_path / "recipe" / "adapter.gguf").exists()
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("recipe", "fitted"))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_checkpoint_keeps_the_dtype_of_the_base(long_llama, tmp_path, posbias):
    whole = pb.load_model(str(long_llama), device="cpu")
    whole.network.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    whole.tokenizer.save_pretrained(tmp_path / "base")
    base = pb.load_model(str(tmp_path / "base"), device="cpu")
    assert base.dtype == torch.float32
    write_recipe(tmp_path / "recipe.json", random_adapter(base), base, {})
    logits_of, command = {}, ("export", tmp_path / "recipe.json", "--model", tmp_path / "base", "--merged", "--to")
    for dtype, more in (("own", ()), ("float32", ("--dtype", "float32"))):
        done = posbias(*command, tmp_path / dtype, *more)
        assert done.returncode == 0, done.stderr
        served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").eval()
        assert {weight.dtype for weight in served.parameters()} == {getattr(torch, dtype, torch.bfloat16)}
        logits_of[dtype] = logits(served.float())
    expected = under(base, read_recipe(tmp_path / "recipe.json", base))
    torch.testing.assert_close(logits_of["float32"], expected, **SERVED)
    changed = float((expected - logits(base.network)).abs().max())
    assert float((logits_of["own"] - expected).abs().max()) < 0.05 * changed, "but for rounding"
    other = load_safetensors(tmp_path / "base" / "model.safetensors")
    other["model.norm.weight"] += 1.0
    save_safetensors(other, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    done = posbias(*command, tmp_path / "none")
    assert "is a recipe of another model" in done.stderr, "weights are compared in that dtype, too"


def test_what_cannot_be_exported_is_refused_in_one_line(tmp_path, long_llama, posbias):
    model, new = shaken_model("llama", dtype=torch.float32), tmp_path / "new"
    for fitted, why in (
        *(
            (Fitted(MITIGATIONS.parse(name), {}), refused)
            for name, refused in (
                ("temperature", "temperature cannot be exported: no weight knows the places of tokens, and none ch"),
                ("repeat_prompt", "and none changes a prompt; allowed: adapter"),
                ("adapter", "adapter: it is not fitted yet"),
            )
        ),
        ("temperature", "'temperature' holds no posbias run"),
        (Fitted(random_adapter(shaken_model("qwen3")), {}), "it was fitted to another model"),
        (3, "export: fitted must be Fitted or Chosen or a text or a path, got 3"),
        (str(tmp_path / "none"), "none"),
    ):
        with pytest.raises(pb.UsageError, match=why.replace("(", r"\(")) as refusal:
            pb.export(fitted, new, model=model)
        assert "\n" not in str(refusal.value)
    falcon = shaken_model("falcon", dtype=torch.float32)
    with pytest.raises(pb.UsageError, match=r"^export: no GGUF adapter of a falcon model can be written; "):
        pb.export(Fitted(random_adapter(falcon), {}), new, model=falcon, gguf=True)
    assert list(tmp_path.iterdir()) == []
    new.mkdir()
    for merged in (False, True):
        with pytest.raises(pb.UsageError, match=r"^'.*new' exists; a method is exported to a new directory only$"):
            pb.export(Fitted(random_adapter(model), {}), new, model=model, merged=merged)
    method = random_adapter(model)
    model.network.hf_quantizer = object()
    with pytest.raises(pb.UsageError, match=r"^export: the weights of 'network' are quantised; load "):
        pb.export(Fitted(method, {}), tmp_path / "other", model=model, merged=True)
    for words in (
        (tmp_path / "none", "--to", tmp_path / "other"),
        (tmp_path / "none.json", "--to", tmp_path / "other"),
    ):
        done = posbias("export", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_method_that_was_fitted_to_other_weights_is_refused(long_llama, tmp_path):
    model = pb.load_model(str(long_llama), device="cpu")
    write_recipe(tmp_path / "recipe.json", random_adapter(model), model, {})
    examples = list(KeyValue(pairs=2).examples(model.tokenizer, count=5, seed=5))
    fitted = pb.fit("adapter(rank=1)", model, examples, options=pb.FitOptions(steps=1, rate=0.1))
    wide = pb.load_model(str(long_llama), device="cpu", dtype="float64")
    with pb.mitigated(model, fitted.method), pb.mitigated(wide, replace(fitted.method, strength=0.5)):
        pass  # numbers of more bits are the same weights
    with torch.no_grad():
        model.network.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0  # another revision
    with pytest.raises(pb.UsageError, match=r"is a recipe of another model, .*: its weights_sha256 is"):
        pb.export(str(tmp_path / "recipe.json"), tmp_path / "out", model=model)
    for refused in (
        lambda: pb.export(fitted, tmp_path / "out", model=model),
        lambda: pb.mitigated(model, fitted.method),
        lambda: answering_under(fitted.method, pb.LocalResponder(model)),
    ):
        with pytest.raises(pb.UsageError, match=r"^adapter was fitted to another model, 'long-llama': its weights_sha"):
            refused()


def test_the_name_and_revision_of_the_base_model_are_written(tmp_path):
    model = shaken_model("llama", dtype=torch.float32)
    named = HuggingFaceModel(model.network, origin=Origin("someone/model", revision="abc"))
    pb.export(Fitted(random_adapter(named), {}), tmp_path / "adapter", model=named)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("someone/model", "abc")
    assert {path.rpartition(".")[2] for path in settings["target_modules"]} == {"k_proj", "q_proj"}
