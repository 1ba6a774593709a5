"""What a session sent before is not parsed again, and what comes out is what a full parse gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polynya.dialects.anthropic_messages import AnthropicMessages
from polynya.dialects.base import BadRequest, Dialect
from polynya.dialects.history import History
from polynya.dialects.neutral import ChatRequest
from polynya.dialects.openai_chat import OpenAIChat

KEY = b'"messages":['
PATH = "/v1/messages"
DIALECTS: list[Dialect] = [AnthropicMessages(), OpenAIChat()]


def compact(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def body_of(messages: list[Any], **fields: Any) -> bytes:
    return compact({"model": "m", "messages": messages, "max_tokens": 5, **fields})


def told(request: ChatRequest) -> Any:
    leftovers = {name: bytes(raw) if isinstance(raw, msgspec.Raw) else raw for name, raw in request.leftovers.items()}
    tools = bytes(request.tools_raw) if request.tools_raw is not None else None
    return (
        [(m.role, m.raw, m.media) for m in request.messages],
        [(t.name, t.description, bytes(t.parameters)) for t in request.tools],
        tools, request.model, request.sampling, request.stream, leftovers,
    )  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> Iterator[bytes]:
    """Requests of one session: history goes on, is cut, rewritten at its end, or begun anew; spelled in several ways."""
    roles = st.sampled_from(["user", "assistant"])
    texts = st.text(st.sampled_from('a"\\é\n]},\U0001f600'), max_size=6)
    parts = texts.map(lambda text: [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}])
    message = st.fixed_dictionaries({"role": roles, "content": st.one_of(texts, parts)})
    history: list[Any] = draw(st.lists(message, min_size=1, max_size=3))
    bodies = []
    for _ in range(draw(st.integers(1, 6))):
        cut = draw(st.integers(0, len(history)))
        history = history[:cut] + draw(st.lists(message, min_size=1, max_size=3))
        spaced, escaped = draw(st.booleans()), draw(st.booleans())
        fields: dict[str, Any] = draw(st.sampled_from([{}, {"system": "s"}, {"metadata": {"messages": [1]}}]))
        order = (
            {"model": "m", **fields, "messages": history} if draw(st.booleans()) else {"messages": history, **fields}
        )
        document = {"model": "m", "max_tokens": 5, **order}
        bodies.append(json.dumps(document, separators=None if spaced else (",", ":"), ensure_ascii=escaped).encode())
    return bodies  # type: ignore[return-value]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(bodies=conversations())
def test_a_session_is_understood_as_each_of_its_requests_alone(dialect: Dialect, bodies: list[bytes]) -> None:
    history: History[Any] = History(1)
    for body in bodies:
        assert told(dialect.parse(body, PATH, history)) == told(dialect.parse(body, PATH))


def test_only_what_is_new_is_parsed() -> None:
    history: History[Any] = History(1)
    first = [{"role": "user", "content": f"message {i}"} for i in range(20)]
    OpenAIChat().parse(body_of(first), PATH, history)
    cut = history.cut(body_of([*first, {"role": "user", "content": "new"}], tools=[]), KEY)
    assert len(cut.values) == 20
    assert json.loads(cut.body)["messages"] == [{"role": "user", "content": "new"}]
    rewritten = history.cut(body_of([*first[:19], {"role": "user", "content": "other"}]), KEY)
    assert len(rewritten.values) == 19
    assert history.chars == len(compact(first)) - 2


def test_conversations_of_one_session_do_not_push_each_other_out() -> None:
    history: History[Any] = History(1)
    talks = [[{"role": "user", "content": f"talk {talk}, {i}"} for i in range(9)] for talk in range(3)]
    for talk in [*talks, *talks]:
        OpenAIChat().parse(body_of(talk), PATH, history)
    assert [len(history.cut(body_of(talk), KEY).values) for talk in talks] == [9, 9, 9]


@pytest.mark.parametrize(
    "body",
    [
        b'{"metadata":{"messages":[%b]},"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":5}',
        b'{"model":"m","messages":[%b],"messages":[{"role":"user","content":"x"}],"max_tokens":5}',
        b'{"model":"m","note":"\\"messages\\":[","messages":[%b,{"role":"user","content":"x"}],"max_tokens":5}',
    ],
)
def test_a_list_that_is_not_the_requests_own_is_not_cut(body: bytes) -> None:
    known = compact({"role": "user", "content": "hello"})
    for dialect in DIALECTS:
        history: History[Any] = History(1)
        dialect.parse(body_of([json.loads(known)]), PATH, history)
        assert told(dialect.parse(body % known, PATH, history)) == told(dialect.parse(body % known, PATH))


@pytest.mark.parametrize(
    "new",
    [
        b'{"role":"user","content":"a"}],"temperature":0.5,"messages":[{"role":"user","content":"b"}',
        b'{"role":"user","content":"a"}],"temperature":0.5,"x":[1',
        b'{"role":"user","content":"],\\"max_tokens\\":5}"}',
        b'{"role":"user","content":"a","x":[[]]} , {"role":"user","content":"b"} ',
    ],
)
def test_a_list_ends_where_the_parser_says_whatever_follows_it(new: bytes) -> None:
    known = compact({"role": "user", "content": "hello"})
    for dialect in DIALECTS:
        history: History[Any] = History(1)
        dialect.parse(body_of([json.loads(known)]), PATH, history)
        body = b'{"model":"m","messages":[' + known + b"," + new + b'],"max_tokens":5}'
        assert told(dialect.parse(body, PATH, history)) == told(dialect.parse(body, PATH))


def test_a_list_that_stands_where_the_requests_own_did_before_is_not_taken_for_it() -> None:
    said = [{"role": "user", "content": "a"}]
    before = b'{"model":"m","x":{},' + KEY + compact(said)[1:] + b',"max_tokens":5}'
    inner = (
        b'{"model":"m","xyz":{'
        + KEY
        + compact(said)[1:]
        + b"},"
        + KEY
        + b'{"role":"user","content":"b"}],"max_tokens":5}'
    )
    spoken = b'{"model":"m","x":"' + KEY.replace(b'"', b'\\"') + b'","messages":[{"role":"user","content":"b"}]}'
    assert before.index(KEY) == inner.index(KEY) < inner.rindex(KEY)
    history: History[Any] = History(1)
    for body in (before, before, inner, spoken, before, inner):
        assert told(AnthropicMessages().parse(body, PATH, history)) == told(AnthropicMessages().parse(body, PATH))


def test_what_stands_around_the_list_is_read_once_while_it_stays_the_same() -> None:
    history: History[Any] = History(1)
    messages = [{"role": "user", "content": "hello"}]
    first = OpenAIChat().parse(body_of(messages, seed=1), PATH, history)
    again = OpenAIChat().parse(body_of([*messages, *messages], seed=1), PATH, history)
    other = OpenAIChat().parse(body_of([*messages, *messages], seed=2), PATH, history)
    assert again.sampling is first.sampling
    assert (len(again.messages), again.sampling.seed, other.sampling.seed) == (2, 1, 2)


@pytest.mark.parametrize("rest", [b"]", b",", b",]", b"}", b"", b" {}]}", b",,{}]}", b",1]}"])
def test_what_is_no_json_stays_an_error(rest: bytes) -> None:
    known = compact({"role": "user", "content": "hello"})
    history: History[Any] = History(1)
    OpenAIChat().parse(body_of([json.loads(known)]), PATH, history)
    with pytest.raises(BadRequest):
        OpenAIChat().parse(b'{"model":"m","messages":[' + known + rest, PATH, history)


def test_an_error_names_the_message_by_its_place_in_the_whole_list() -> None:
    history: History[Any] = History(1)
    known = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    OpenAIChat().parse(body_of(known), PATH, history)
    with pytest.raises(BadRequest, match=r"messages\[2\]\.role"):
        OpenAIChat().parse(body_of([*known, {"role": "nobody", "content": ""}]), PATH, history)


def test_half_a_surrogate_pair_in_what_is_new_is_replaced_and_nothing_is_lost() -> None:
    history: History[Any] = History(1)
    known = [{"role": "user", "content": "hello"}]
    OpenAIChat().parse(body_of(known), PATH, history)
    body = body_of(known)[: -len(b'],"max_tokens":5}')] + b',{"role":"user","content":"\\ud83d"}],"max_tokens":5}'
    request = OpenAIChat().parse(body, PATH, history)
    assert [message.text for message in request.messages] == ["hello", "�"]
    again = OpenAIChat().parse(body, PATH, history)
    assert told(again) == told(request)


def test_changed_tools_are_read_anew() -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {}}}

    history: History[Any] = History(1)
    messages = [{"role": "user", "content": "hello"}]
    for name in ("a", "a", "b"):
        request = OpenAIChat().parse(body_of(messages, tools=[tool(name)]), PATH, history)
        assert [spec.name for spec in request.tools] == [name]


def test_what_is_nested_too_deep_is_refused_in_words_after_other_requests_too() -> None:
    history: History[Any] = History(1)
    known = compact({"role": "user", "content": "hello"})
    OpenAIChat().parse(body_of([json.loads(known)]), PATH, history)
    deep = b'{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(BadRequest):
        OpenAIChat().parse(b'{"model":"m","messages":[' + known + b"," + deep + b'],"max_tokens":5}', PATH, history)
