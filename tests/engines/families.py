# ruff: noqa: E501
"""Chat templates in the style of the model families, a small byte-level BPE with their control tokens, and a desk over both.

The templates are short ones of our own that end turns, print tools, strip thinking and join tool results as the families do.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from polynya.engines.vocabulary import discover
from polynya.errors import EngineRejected
from polynya.tokens.bridge import Vocabulary

_CALLS = """
{%- macro said(m) %}{% if m.content is string %}{{ m.content }}{% elif m.content %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}
"""
QWEN3 = (
    _CALLS
    + """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}{% for t in tools %}{{ '\\n' + (t|tojson) }}{% endfor %}{{ '\\n</tools>\\nUse <tool_call></tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not said(m).startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + said(m) + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = said(m) %}{% set thought = m.reasoning_content or '' %}
        {%- if '</think>' in content %}{% set thought = content.split('</think>')[0] %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments|tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + said(m) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
)
LLAMA31 = (
    _CALLS
    + """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content|trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls|length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + (m.tool_calls[0].function.arguments|tojson) + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content|tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools and loop.first %}{{ 'Functions: ' + (tools|tojson) + '\\n\\n' }}{% endif %}
        {{- said(m)|trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
)
GPTOSS = (
    _CALLS
    + """
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\n' + (tools|tojson) + '<|end|>' }}{% endif %}
{%- set ns = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.tool_calls %}
            {%- if said(m) %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + said(m) + '<|end|>' }}{% endif %}
            {%- set ns.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' + (m.tool_calls[0].function.arguments|tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + said(m) + '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + (m.content|tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + said(m) + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
)
SMOLLM2 = (
    _CALLS
    + """
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + said(m) + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
GLM = (
    _CALLS
    + """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n# Tools\\n' }}{% for t in tools %}{{ (t|tojson) + '\\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>\\n' + said(m) }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think></think>' }}{% if said(m).strip() %}{{ '\\n' + said(m).strip() }}{% endif %}
        {%- for c in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + c.function.name }}
            {%- for k, v in c.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v|tojson) + '</arg_value>' }}{% endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + said(m) + '\\n</tool_response>' }}
    {%- elif m.role == 'system' %}{{ '<|system|>\\n' + said(m) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
)
QWEN35 = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{% if enable",
    "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}{% if enable",
).replace(
    "(m.role == 'system' and not loop.first)",
    "(m.role == 'system' and not loop.first and raise_exception('System message must be at the beginning.'))",
)
MISTRAL = """
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + (tools|tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
    {%- elif m.role == 'system' %}{{ '[INST]' + m.content + '[/INST]' }}
    {%- else %}{{ raise_exception('roles') }}
    {%- endif %}
{%- endfor %}"""
TEMPLATES = {"qwen3": QWEN3, "llama31": LLAMA31, "gptoss": GPTOSS, "smollm2": SMOLLM2, "glm": GLM, "qwen35": QWEN35}

CONTROL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|call|>",
        "<|return|>",
    ),
    *(
        "[gMASK]",
        "<sop>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|system|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
    ),
)
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
)
_TEXT = """The quick brown fox jumps over the lazy dog. def f(x):\n        return x + 1\n\n
{"name": "bash", "arguments": {"command": "ls -la /tmp | grep -v <none>", "path": "/etc/hosts"}}\n\n\n
Result: user assistant system tool functions naïve café 漢字 <|im <| |> </ <b>bold</b> [INST [/ <tool </tool response>\n
x = [1, 2.5, 30]; print("hello world", 'it is', flush=True)  # end of line\n\tpass\n\n"""


@functools.cache
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """``(plain, with control tokens)``, both with Qwen's normalisation."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([_TEXT] * 4, trainer)
    whole = Tokenizer.from_str(made.to_str())
    whole.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    whole.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    return made, whole


def _raise(message: str) -> None:
    raise TemplateError(message)


class FamilyDesk:
    """A ``TemplateDesk`` over a template and the small tokenizer. Counts what it is asked."""

    def __init__(self, template: str) -> None:
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        env.globals["raise_exception"] = _raise
        self._env = env
        self.template = template
        self._compiled = env.from_string(template)
        self.plain, self.whole = tokenizers()
        self.vocabulary = Vocabulary(special={}, stop_ids=frozenset())
        self.renders = self.encodes = 0

    def becomes(self, template: str) -> None:
        """Prints something else from here on, as a template with a clock does."""
        self._compiled = self._env.from_string(template)

    async def learn(self) -> FamilyDesk:
        found = await discover(self.render, self.encode_special, template=self.template)
        assert found is not None
        self.vocabulary = found
        return self

    async def render(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> str:
        self.renders += 1
        said: list[dict[str, Any]] = [json.loads(message) for message in messages]
        for message in said:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        kwargs = json.loads(template_kwargs or b"{}")
        try:
            return self._compiled.render(
                messages=said, tools=json.loads(tools or b"null"), add_generation_prompt=True, **kwargs
            )
        except TemplateError as exc:
            raise EngineRejected(str(exc)) from exc

    async def render_ids(self, messages: list[bytes], tools: bytes | None, template_kwargs: bytes | None) -> list[int]:
        return await self.encode_special(await self.render(messages, tools, template_kwargs))

    async def encode(self, texts: list[str]) -> list[list[int]]:
        self.encodes += 1
        return [self.plain.encode(text).ids for text in texts]

    async def encode_special(self, text: str) -> list[int]:
        return self.whole.encode(text).ids

    async def decode(self, ids: list[int]) -> str:
        return self.whole.decode(ids, skip_special_tokens=False)
