"""The scripted server with the other doors of a vLLM server: render, generate, derender and completions."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from polynya.engines.base import EffectiveSampling, EngineReply
from polynya.engines.scripted import Script, ScriptedApp, tokens
from polynya.engines.scripted.app import _tool_specs
from polynya.engines.scripted.desk import spoiled
from polynya.schema import Int32Array

_CALL = re.compile(r"<\|call\|>(.*?)<\|args\|>(.*?)(?=<\|call\|>|<\|end\|>|$)", re.DOTALL)


class RoutedApp(ScriptedApp):
    """``doors``: which of ``generate`` and ``completions`` it has. ``hermes``: its template prints calls as Hermes does."""

    def __init__(self, script: Script, *doors: str, hermes: bool = True, obeys: bool = True) -> None:
        super().__init__(script)
        self.doors = doors
        self.hermes = hermes
        self.obeys = obeys
        """Conditions on the ids that it is given beside messages."""
        self.weights: list[dict[str, Any]] | None = None
        self.spoils: dict[str, Any] = {}
        """Fields of a generated choice, in place of the true ones."""
        self._chat_of_generate: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def _plan(self, body: Any, affinity: str) -> Any:
        if not self.obeys:
            body.kv_transfer_params = None
        return super()._plan(body, affinity)

    def _simple(self, route: tuple[str, str], body: bytes) -> dict[str, Any] | None:
        path = route[1]
        door, answer = {
            "/v1/chat/completions/render": ("generate", self._rendered),
            "/inference/v1/generate": ("generate", self._generated),
            "/v1/chat/completions/derender": ("generate", self._derendered),
            "/v1/completions": ("completions", self._completed),
        }.get(path, ("", None))
        if answer is not None and door in self.doors:
            asked = msgspec.json.decode(body)
            self.asked.append((path, asked))
            return answer(asked)
        answered = super()._simple(route, body)
        if answered is not None and path == "/detokenize" and self.hermes:
            answered["prompt"] = hermes(answered["prompt"])
        return answered

    def _render_chat(self, asked: dict[str, Any]) -> Int32Array:
        messages = msgspec.convert(asked["messages"], list[tokens.WireMessage])
        return self._render(messages, msgspec.Raw(msgspec.json.encode(asked.get("tools"))))

    def _sampled(self, prompt: Int32Array, limit: int | None, chat: dict[str, Any]) -> EngineReply:
        tools = _tool_specs(msgspec.Raw(msgspec.json.encode(chat.get("tools"))))
        planned = self.desk.plan("", prompt, tools, EffectiveSampling(max_tokens=limit), token_in=True)
        return spoiled(planned, None)

    def _rendered(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._chat_of_generate = asked
        prompt = self._render_chat(asked)
        limit = asked.get("max_completion_tokens") or self.script.window - int(prompt.size)
        return {"token_ids": prompt.tolist(), "sampling_params": {"temperature": 1.0, "max_tokens": limit}}

    def _generated(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = np.array(asked["token_ids"], dtype=np.int32)
        reply = self._sampled(prompt, asked["sampling_params"]["max_tokens"], self._chat_of_generate)
        assert reply.sampled_ids is not None and reply.logprobs is not None
        ids = reply.sampled_ids.tolist()
        content = [
            {"token_id": token, "logprob": value} for token, value in zip(ids, reply.logprobs.tolist(), strict=True)
        ]
        choice = {
            "token_ids": ids,
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
            "logprobs": {"content": content},
            "weight_versions": self.weights,
        }
        usage = {"prompt_tokens": prompt.size, "completion_tokens": len(ids)}
        return {
            "request_id": "generated",
            "prompt_token_ids": prompt.tolist(),
            "usage": {name: int(count) for name, count in usage.items()},
            "choices": [choice | self.spoils],
        }

    def _derendered(self, asked: dict[str, Any]) -> dict[str, Any]:
        choice = asked["generate_response"]["choices"][0]
        text, reasoning, calls = tokens.parse_reply(np.array(choice["token_ids"], dtype=np.int32))
        message: dict[str, Any] = {"role": "assistant", "content": text or None, "reasoning": reasoning or None}
        if calls:
            message["tool_calls"] = [
                {"id": f"c{len(choice['token_ids'])}.{n}", "function": {"name": call.name, "arguments": call.arguments}}
                for n, call in enumerate(calls)
            ]
        return {"choices": [{"message": message, "finish_reason": choice["finish_reason"]}]}

    def _completed(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = np.array(asked["prompt"], dtype=np.int32)
        reply = self._sampled(prompt, asked.get("max_tokens"), {"tools": [{"function": {"name": "bash"}}]})
        assert reply.sampled_ids is not None and reply.logprobs is not None
        said = tokens.decode(reply.sampled_ids[: -1 if reply.finish_reason != "length" else None])
        choice = {
            "text": hermes(said),
            "finish_reason": "length" if reply.finish_reason == "length" else "stop",
            "token_ids": reply.sampled_ids.tolist(),
            "prompt_token_ids": prompt.tolist(),
            "logprobs": {"token_logprobs": reply.logprobs.tolist()},
        }
        return {"id": "completed", "choices": [choice | self.spoils], "usage": {"prompt_tokens": int(prompt.size)}}


def hermes(text: str) -> str:
    spelled = text.replace("<|think|>", "<think>").replace("<|/think|>", "</think>")
    return _CALL.sub(r'<tool_call>\n{"name": "\1", "arguments": \2}\n</tool_call>', spelled)
