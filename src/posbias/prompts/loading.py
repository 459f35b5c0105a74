"""`load_prompts`: equally long prompts from the default corpus, a file, or token ids that are ready."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.progress import track
from posbias.prompts.chat import CHAT_SCHEME, chat_file_prompts
from posbias.prompts.datasets_hub import SCHEME, dataset_group, parse_dataset
from posbias.prompts.prompts import Prompts, PromptSource, shuffled, synthetic_prompts
from posbias.prompts.sources import Document, Group, default_corpus, jsonl_file, parquet_file, text_file
from posbias.prompts.tokens import TokenModel, as_token_ids, check_request, check_vocabulary, opening, tokenise
from posbias.prompts.windows import WindowDrawer


@checked
def load_prompts(source: Any, model: TokenModel, *, n_positions: int, count: int, seed: int = 0) -> Prompts:
    """Equally long prompts for a model.

    From text, prompts are random windows inside documents: distinct even without case and white space, non-overlapping
    while there is room, spread evenly over files and documents, and the same for every count (the first 8 of 16 are
    the 8). Documents shorter than a window are skipped. If the tokenizer puts special tokens before a text by default
    (BOS), they open every prompt and count as positions (`Prompts.prefix` records them); none are added inside.
    Records of token ids get none.

    Args:
        source: "default" (the corpus in the package); the path of a .txt file (UTF-8; a line that holds only a form
            feed separates documents), or of a .jsonl or .parquet file (field `text`, else `token_ids`; another one as
            "FILE#FIELD"); "hf:owner/name[config]:split#field", a dataset of Hugging Face or a local directory of data
            files, streamed; "synthetic", uniform random tokens; token ids of shape [at least count, n_positions]; or
            `Prompts`. Of the last two the first `count` are taken. Any of these inside a `PromptSource`, for document
            starts or shuffled tokens. "chat:FILE.jsonl": the first `count` distinct conversations of that length.
        model: Gives `tokenizer`, `vocabulary_size` and `max_positions`.
        n_positions: Tokens in each prompt, 2 ... model.max_positions.
        count: How many prompts, >= 1.
        seed: Chooses the windows, >= 0.

    Returns:
        Exactly `count` prompts of exactly `n_positions` token ids, all within the vocabulary.

    Raises:
        UsageError: an argument out of range, a source that cannot be read or is too short, token ids the model lacks.
    """
    check_request(model, n_positions=n_positions, count=count, seed=seed)
    request = source if isinstance(source, PromptSource) else PromptSource(source)
    prompts = _unshuffled(request, model, n_positions=n_positions, count=count, seed=seed)
    return shuffled(prompts, seed) if request.shuffle else prompts


def _unshuffled(request: PromptSource, model: TokenModel, *, n_positions: int, count: int, seed: int) -> Prompts:
    """The prompts as the source gives them."""
    source = request.source
    ready = isinstance(source, Prompts) or not isinstance(source, str | os.PathLike)
    if request.windows == "starts" and (ready or source == "synthetic"):
        raise UsageError(f"windows 'starts' needs documents; {'token ids' if ready else repr(source)} have none")
    if ready:
        prompts = source if isinstance(source, Prompts) else None
        token_ids = as_token_ids(source, "token ids") if prompts is None else prompts.token_ids
        token_ids = _ready(token_ids, model, n_positions=n_positions, count=count)
        return Prompts(token_ids) if prompts is None else replace(prompts, token_ids=token_ids)
    if source == "synthetic":
        return synthetic_prompts(model, n_positions=n_positions, count=count, seed=seed)
    if isinstance(source, str) and source.startswith(CHAT_SCHEME):
        return chat_file_prompts(request, model, n_positions=n_positions, count=count)
    name, groups = _groups(request, n_positions, seed)
    prefix = _prefix(groups, model, name)
    if n_positions <= len(prefix):
        raise UsageError(
            f"n_positions must exceed the {len(prefix)} special tokens that open a text, got {n_positions}"
        )
    drawer = _drawer(groups, model, n_positions - len(prefix), seed=seed, starts_only=request.windows == "starts")
    windows = drawer.draw()
    token_ids = np.empty((count, n_positions), dtype=np.int64)
    token_ids[:, : len(prefix)] = prefix
    for number in track(range(count), "Prompts"):
        window = next(windows, None)
        if window is not None:
            token_ids[number, len(prefix) :] = window
        elif drawer.longest == 0:
            raise UsageError(f"{name} holds no text")
        elif number == 0:
            longest = drawer.longest + len(prefix)
            raise UsageError(f"{name}: no document gives {n_positions} tokens; the longest available gives {longest}")
        else:
            raise UsageError(f"{name} gives only {number} distinct prompts of {n_positions} tokens, {count} asked")
    return Prompts(
        token_ids, source=name, seed=seed, prefix=prefix, windows=request.windows, duplicates=drawer.duplicates
    )


def _ready(
    token_ids: Int64[np.ndarray, "..."], model: TokenModel, *, n_positions: int, count: int
) -> Int64[np.ndarray, "count n_positions"]:
    """The first `count` rows of token ids that fit the request exactly."""
    if token_ids.ndim != 2:
        raise UsageError(f"token ids need shape [count, n_positions], got {list(token_ids.shape)}")
    rows, length = token_ids.shape
    if length != n_positions:
        fault = "shorter" if length < n_positions else "longer"
        raise UsageError(f"the prompts given have {length} tokens, {fault} than the {n_positions} asked")
    if rows < count:
        raise UsageError(f"{count} prompts asked, but only {rows} given")
    check_vocabulary(token_ids[:count], model, "token ids")
    return token_ids[:count]


def _drawer(groups: list[Group], model: TokenModel, length: int, *, seed: int, starts_only: bool) -> WindowDrawer:
    """Draws windows of checked token ids, no two of which say the same.

    Two windows do whose text without case and white space is equal, or else whose token ids are.
    """

    def to_token_ids(documents: list[Document], name: str) -> list[Int64[np.ndarray, "_"]]:
        texts = [document for document in documents if isinstance(document, str)]
        ready = [document for document in documents if not isinstance(document, str)]
        found = tokenise(texts, model.tokenizer) + ready
        for token_ids in found:
            check_vocabulary(token_ids, model, name)
        return found

    def text_of(window: Int64[np.ndarray, "length"]) -> bytes:
        text: str = model.tokenizer.decode(window.tolist(), clean_up_tokenization_spaces=False)
        return "".join(text.split()).casefold().encode() or bytes(window)

    same = bytes if model.tokenizer is None else text_of
    return WindowDrawer(groups, to_token_ids, length, seed, starts_only=starts_only, same=same)


def _groups(request: PromptSource, n_positions: int, seed: int) -> tuple[str, list[Group]]:
    """What to call the source, and its documents."""
    text = os.fspath(request.source)
    if text == "default":
        return text, default_corpus()
    if text.startswith(SCHEME):
        dataset = parse_dataset(text)
        return dataset.name, [dataset_group(dataset, seed=seed)]
    path, field = Path(text), None
    if not path.exists() and "#" in text:
        before, _, after = text.rpartition("#")
        path, field = Path(before), after or None
    suffix = path.suffix.lower()
    if suffix == ".txt" and field is None:
        return path.name, [text_file(path, n_positions, starts=request.windows == "starts")]
    if suffix in (".jsonl", ".parquet"):
        read = jsonl_file if suffix == ".jsonl" else parquet_file
        return text.rpartition(os.sep)[2], [read(path, n_positions, field)]
    raise UsageError(
        f"prompts {text!r}: need 'default', 'synthetic', a .txt, .jsonl or .parquet file[#field], "
        "'hf:owner/name', or token ids"
    )


def _prefix(groups: list[Group], model: TokenModel, name: str) -> tuple[int, ...]:
    """The special tokens that open each prompt; nothing where the documents are token ids."""
    if not any(group.is_text for group in groups):
        return ()
    if model.tokenizer is None:
        raise UsageError(f"{name}: the model has no tokenizer, so prompts must be token ids, not text")
    prefix = opening(model.tokenizer)
    check_vocabulary(np.asarray(prefix, dtype=np.int64), model, "tokenizer")
    return prefix
