"""The scripted engine over real HTTP."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest

from polynya.engines.scripted import Fault, Script, Step, scripted_app, serve
from polynya.engines.scripted.tokens import END

FULL = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def chat(url: str, **body: object) -> tuple[int, dict[str, object]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json={**HI, **FULL, **body}, headers={"x-session-id": "s"}) as answer,
    ):
        return answer.status, json.loads(await answer.read())


async def test_a_chat_reply_holds_the_scripts_ids_and_logprobs() -> None:
    script = Script(steps=[Step(text="hello")])
    async with serve(scripted_app(script)) as url:
        status, reply = await chat(url)
    expected = script.expected("s", 0)
    choice = reply["choices"][0]  # type: ignore[index]
    assert status == 200
    assert choice["token_ids"] == expected.sampled_ids.tolist()
    logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    assert np.array_equal(logprobs, expected.logprobs)
    assert reply["prompt_token_ids"] == [258, 104, 105, END, 259]


async def test_ids_and_logprobs_come_only_when_asked_for() -> None:
    async with serve(scripted_app()) as url:
        _, reply = await chat(url, logprobs=True, top_logprobs=None, return_token_ids=False)
    choice = reply["choices"][0]  # type: ignore[index]
    assert (choice["logprobs"], choice["token_ids"], reply["prompt_token_ids"]) == (None, None, None)


async def test_prompt_ids_are_taken_through_kv_transfer_params() -> None:
    app = scripted_app()
    async with serve(app) as url:
        _, reply = await chat(url, kv_transfer_params={"prompt_token_ids": [1, 2, 3]})
    assert reply["prompt_token_ids"] == [1, 2, 3]
    assert app.desk.calls[0].token_in


async def test_side_endpoints_answer() -> None:
    async with serve(scripted_app()) as url, aiohttp.ClientSession(url) as http:
        async with http.get("/v1/models") as answer:
            models = json.loads(await answer.read())
        async with http.post("/tokenize", json={**HI, "return_token_strs": True}) as answer:
            ids = json.loads(await answer.read())
        async with http.post("/detokenize", json={"tokens": [104, 105]}) as answer:
            text = json.loads(await answer.read())
        async with http.get("/nothing") as answer:
            missing = answer.status
    assert models["data"][0]["max_model_len"] == 131_072
    assert (ids["count"], ids["token_strs"][-1]) == (5, "<|assistant|>")
    assert text == {"prompt": "hi"}
    assert missing == 404


async def test_a_client_that_goes_away_is_noticed() -> None:
    app = scripted_app(Script(steps=[Step(fault=Fault(kind="hang"))]))
    async with serve(app) as url:
        call = asyncio.create_task(chat(url))
        await app.desk.until(lambda: app.desk.in_flight == 1)
        call.cancel()
        await asyncio.wait({call})
        await app.desk.until(lambda: app.desk.aborted == 1)
        assert app.desk.in_flight == 0


@pytest.mark.parametrize("kind", ["reset", "reset_midway", "truncated"])
async def test_a_reset_breaks_the_connection(kind: str) -> None:
    app = scripted_app(Script(steps=[Step(fault=Fault(kind=kind, times=1), text="ok")]))  # type: ignore[arg-type]
    async with serve(app) as url:
        with pytest.raises(aiohttp.ClientError):
            await chat(url)
        status, _ = await chat(url)
    assert status == 200


async def test_an_http_fault_carries_status_and_retry_after() -> None:
    app = scripted_app(Script(steps=[Step(fault=Fault(kind="http_error", status=429, retry_after="7"))]))
    async with (
        serve(app) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=HI) as answer,
    ):
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")


async def test_streaming_is_refused() -> None:
    async with serve(scripted_app()) as url:
        status, reply = await chat(url, stream=True)
    assert status == 400
    assert "stream" in str(reply["error"])


async def test_leaving_the_block_cuts_open_connections() -> None:
    app = scripted_app(Script(steps=[Step(fault=Fault(kind="hang"))]))
    async with serve(app) as url:
        call = asyncio.create_task(chat(url))
        await app.desk.until(lambda: app.desk.in_flight == 1)
    with pytest.raises(aiohttp.ClientError):
        await call
