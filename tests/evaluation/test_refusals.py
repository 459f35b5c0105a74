"""What servers say instead of an answer, in the words of many of them, and what that means for a run."""

import json

import pytest

from posbias.evaluation.responders.refusals import meaning_of, words_of

TOO_LONG = {
    "openai": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    "openai code": "; context_length_exceeded",
    "openai per minute": "Request too large for gpt-4 on tokens per min (TPM): Limit 10000, Requested 12000.",
    "openai text": "Invalid 'messages[1].content': string too long. Expected a string with maximum length 1048576",
    "anthropic": "prompt is too long: 215000 tokens > 200000 maximum",
    "anthropic sum": "input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000",
    "gemini": "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
    "groq": "Please reduce the length of the messages or completion.",
    "xai": "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "mistral": "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "mistral short": "Prompt contains 40000 tokens, too large for this model",
    "cohere": "too many tokens: total number of tokens in the prompt cannot exceed 4081",
    "bedrock": "Input is too long for requested model.",
    "bedrock count": "Too many input tokens. Max input tokens: 8192, request input token count: 9000",
    "bedrock schema": "Malformed input request: expected maxLength: 100000, actual: 120000",
    "vllm": "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
    "vllm old": "max_tokens must be at least 1, got -904.",
    "vllm both": "'max_tokens' is too large: 32. This model's maximum context length is 4096 tokens",
    "sglang": "Input length (5000) exceeds model's maximum length 4096",
    "sglang new": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "sglang sum": "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    "tgi": "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
    "tgi sum": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097",
    "llama.cpp": "the request exceeds the available context size, try increasing it",
    "llama.cpp type": "exceed_context_size_error",
    "llama-cpp-python": "Requested tokens (5000) exceed context window of 4096",
    "lm studio": "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with "
    "context length of only 4096 tokens",
    "tensorrt": "Prompt length (5000) exceeds maximum input length (4096)",
    "lmdeploy": "the request prompt length 5000 is over the session_len 4096",
    "tabby": "Prompt length 5000 is greater than max_seq_len 4096",
    "mlc": "Request prompt has 5000 tokens in total, larger than the model capacity 4096.",
    "litellm": "litellm.ContextWindowExceededError: input tokens exceed the configured limit of 4096 tokens",
    "moonshot": "Invalid request: Your request exceeded model token limit: 8192",
    "dashscope": "Range of input length should be [1, 30720]",
    "zhipu": "Prompt 超长",
    "nginx": "<html><head><title>413 Request Entity Too Large</title></head>",
    "ai21": "The prompt length exceeds the maximum allowed",
    "a text of 300": f"{'x' * 300} maximum context length",
}
OTHERS = {
    "a filter": (
        400,
        "The response was filtered due to the prompt triggering the content management policy.",
        "refused",
    ),
    "another": (400, "Content Exists Risk", "refused"),
    "moderation": (403, "Your chosen model requires moderation and your input was flagged for violence", "refused"),
    "a filter as 500": (500, "data_inspection_failed: Input data may contain inappropriate content.", "refused"),
    "by law": (451, "", "refused"),
    "a wrong field": (400, "Unrecognized request argument supplied: top_kk", "final"),
    "a wrong field of vLLM": (422, "Extra inputs are not permitted; extra_forbidden", "final"),
    "another name": (
        400,
        "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'.",
        "final",
    ),
    "a temperature": (400, "Unsupported value: 'temperature' does not support 0 with this model.", "final"),
    "the key as 400": (400, "API key not valid. Please pass a valid API key.", "final"),
    "the model as 400": (400, "The model `gpt-9` does not exist", "final"),
    "a template": (400, "Conversation roles must alternate user/assistant/user/assistant/...", "refused"),
    "answers too long": (400, "max_tokens is too large: 5000. This model supports 4096 completion tokens", "refused"),
    "too many listed": (400, "Requested prompt logprobs of 5, which is greater than max allowed: 0", "refused"),
    "too many stops": (422, "stop sequences: request has more than 4 stop sequences", "refused"),
    "the key": (401, "Incorrect API key provided: the request exceeds nothing", "final"),
    "no right": (403, "You do not have access to this organization", "final"),
    "no model": (404, "The model `m` does not exist or its context length is unknown", "final"),
    "money": (429, "You exceeded your current quota, please check your plan and billing details.", "final"),
    "money by code": (429, "Please retry in 34 s; insufficient_quota", "final"),
    "money by balance": (402, "Insufficient Balance", "final"),
    "money as 400": (400, "Your credit balance is too low to access the API.", "final"),
    "a pause": (429, "Rate limit reached for requests per min (RPM): Limit 3, Used 3, Requested 1.", "passes"),
    "a pause of tokens": (429, "Number of request tokens has exceeded your per-minute rate limit", "passes"),
    "a pause with quota": (429, "You exceeded your current quota. Please retry in 34.07s.", "passes"),
    "slow": (500, "The request took too long", "passes"),
    "loading": (503, "Loading model", "passes"),
    "system role": (500, "System role not supported", "passes"),
    "an error in an answer": (200, "Provider returned error", "passes"),
    "a way elsewhere": (307, "", "final"),
    "tokens of all requests": (429, "Too many tokens, please wait before trying again.", "passes"),
    "tokens of a minute": (429, "Tokens per minute limit exceeded - too many tokens processed.", "passes"),
    "a gateway's patience": (504, "The request took longer than 60 seconds", "passes"),
    "a client's patience": (408, "Request exceeded the maximum allowed time", "passes"),
    "many at once": (429, "Number of requests exceeds the concurrency limit", "passes"),
    "a queue": (503, "requests waiting more than 30 s", "passes"),
    "no memory": (500, "CUDA out of memory: the input is too large", "passes"),
    "a flagged key": (401, "Your API key was flagged", "final"),
}


@pytest.mark.parametrize("words", TOO_LONG.values(), ids=TOO_LONG)
@pytest.mark.parametrize("status", [200, 400, 422, 500])
def test_a_prompt_that_does_not_fit_is_known_by_the_words_of_many_servers(words: str, status: int) -> None:
    assert meaning_of(status, words) == "too_long"


@pytest.mark.parametrize(("status", "words", "meaning"), OTHERS.values(), ids=OTHERS)
def test_other_refusals_mean_what_they_say(status: int, words: str, meaning: str) -> None:
    assert meaning_of(status, words) == meaning


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"error": {"message": "no", "type": "t", "code": "c"}}, "no; c; t"),
        ({"object": "error", "message": "no", "code": 400}, "no; 400"),
        ({"error": "no"}, "no"),
        ({"detail": [{"loc": ["body", "x"], "msg": "Field required", "type": "missing"}]}, "Field required; missing"),
        ([{"error": {"message": "no", "status": "INVALID_ARGUMENT"}}], "no"),
        (
            {"error": {"message": "Provider returned error", "metadata": {"raw": '{"message": "prompt is too long"}'}}},
            'Provider returned error; {"message": "prompt is too long"}',
        ),
        ({"fault": "no"}, '{"fault": "no"}'),
        ("no", "no"),
    ],
)
def test_the_servers_words_are_found_wherever_it_puts_them(document: object, words: str) -> None:
    assert words_of(json.dumps(document).encode()) == words


@pytest.mark.parametrize("content", [b"", b"plain", b"{", b"[" * 60_000, b'{"error": {"error": ' * 2000])
def test_what_is_no_document_is_repeated_as_it_is(content: bytes) -> None:
    assert words_of(content) == content.decode()
