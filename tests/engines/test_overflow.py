"""How engines say that a prompt does not fit."""

import pytest

from polynya.engines.http import status_error
from polynya.engines.overflow import WORDINGS, Wording, context_overflow
from polynya.errors import ContextOverflow, EngineRejected, EngineUnavailable


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: wording.engine)
def test_each_recorded_text_is_recognised_with_its_window(wording: Wording) -> None:
    found = context_overflow(wording.seen)
    assert found is not None
    assert found.window in (2048, 4096)


def test_prompt_and_window_are_read_out_of_llama_cpps_words() -> None:
    found = context_overflow(
        "request (3000 tokens) exceeds the available context size (2048 tokens), try increasing it"
    )
    assert found is not None and (found.prompt_tokens, found.window) == (3000, 2048)


def test_a_code_alone_is_enough() -> None:
    body = b'{"error":{"message":"Too long.","type":"invalid_request_error","code":"context_length_exceeded"}}'
    assert isinstance(status_error(400, body, "u"), ContextOverflow)


def test_a_full_window_said_with_a_500_is_still_an_overflow() -> None:
    body = b'{"error":{"message":"x","type":"exceed_context_size_error"}}'
    assert isinstance(status_error(500, body, "u"), ContextOverflow)


@pytest.mark.parametrize(
    "words", ["", "the context window is fine", "maximum context length", "unknown tool: context_window"]
)
def test_a_mere_mention_of_the_context_is_no_overflow(words: str) -> None:
    assert context_overflow(words) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"bad field","type":"BadRequestError","code":400}}', "bad field"),
        (b'{"object":"error","message":"bad field","type":"BadRequest","code":400}', "bad field"),
        (b'{"detail":[{"loc":["body"],"msg":"bad field"}]}', "bad field"),
        (b'{"error":"bad field"}', "bad field"),
        (b"bad field", "bad field"),
    ],
)
def test_the_engines_own_words_are_kept(body: bytes, words: str) -> None:
    error = status_error(400, body, "u")
    assert type(error) is EngineRejected and words in error.message and error.status == 400


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_name_is_not_blamed_on_the_policy(status: int) -> None:
    error = status_error(status, b"{}", "http://e")
    assert isinstance(error, EngineUnavailable) and not error.policy_can_cause and "API key" in error.fix
