"""Tools of OpenAI Responses: every kind that real CLIs send, as plain functions upstream, and back.

A ``namespace`` tool goes up as ``namespace__name`` (shortened by a hash above 64 characters; a collision is refused, naming
both), a ``custom`` tool as a function with one string ``input``, ``local_shell`` as a function with its action. Tools that the
provider runs itself (search, interpreters, …) are dropped and named.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from polynya.dialects.base import BadRequest
from polynya.dialects.neutral import ToolAlias, ToolCall, ToolSpec
from polynya.dialects.wire import arguments_object, decode_as, encode, function_tools

NAME_LIMIT = 64
_CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SHELL_SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
}


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    format: msgspec.Raw = msgspec.Raw(b"null")
    tools: list[msgspec.Raw] = []


_tool = msgspec.json.Decoder(_Tool)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SHELL_FRAME: dict[str, Any] = {"type": "exec", "env": {}}
"""What an action has beside the model's own arguments."""
_SHELL_BLANK = {key: encode(value) for key, value in _SHELL_FRAME.items()}


class ToolBox(msgspec.Struct):
    """The tools of one request."""

    specs: list[ToolSpec] = []
    aliases: dict[str, ToolAlias] = {}
    dropped: list[str] = []

    def raw(self) -> msgspec.Raw | None:
        return function_tools(self.specs)


def tool_box(tools: list[msgspec.Raw], where: str) -> ToolBox:
    """Raises BadRequest."""
    box = ToolBox()
    for i, raw in enumerate(tools):
        _add(box, decode_as(_tool, raw, f"{where}[{i}]"), f"{where}[{i}]", "")
    return box


def upstream_name(name: str, namespace: str = "") -> str:
    joined = f"{namespace}__{name}" if namespace else name
    if len(joined) <= NAME_LIMIT:
        return joined
    return joined[: NAME_LIMIT - 9] + "_" + hashlib.blake2b(joined.encode(), digest_size=4).hexdigest()


def custom_input(call: ToolCall) -> str:
    """The text that a custom tool is given; all of the arguments where they name none."""
    text = arguments_object(call.arguments).get("input")
    return text if isinstance(text, str) else call.arguments


def custom_arguments(text: str) -> str:
    return encode({"input": text}).decode()


def shell_action(call: ToolCall) -> dict[str, Any]:
    return {**_SHELL_FRAME, **arguments_object(call.arguments)}


def shell_arguments(action: bytes | msgspec.Raw) -> str:
    """What the model wrote of an action: without its frame, and without the nulls of a client that knows more fields."""
    try:
        fields = _fields.decode(action)
    except (msgspec.DecodeError, RecursionError):
        return bytes(action).decode()
    said = {key: value for key, value in fields.items() if bytes(value) not in (_SHELL_BLANK.get(key), b"null")}
    return encode(said).decode()


def _add(box: ToolBox, tool: _Tool, where: str, namespace: str) -> None:
    match tool.type:
        case "function":
            schema = bytes(tool.parameters)
            _put(box, tool, where, namespace, "function", schema if schema != b"null" else b'{"type":"object"}')
        case "custom":
            _put(box, tool, where, namespace, "custom", encode(_CUSTOM_SCHEMA))
        case "local_shell":
            named = msgspec.structs.replace(tool, name="local_shell", description="Run a command on the local machine.")
            _put(box, named, where, namespace, "local_shell", encode(_SHELL_SCHEMA))
        case "namespace":
            for i, raw in enumerate(tool.tools):
                nested = decode_as(_tool, raw, f"{where}.tools[{i}]")
                if i == 0 and tool.description:
                    # what is said of the whole namespace has no other place upstream
                    both = f"{tool.description}\n\n{nested.description or ''}".rstrip()
                    nested = msgspec.structs.replace(nested, description=both)
                _add(box, nested, f"{where}.tools[{i}]", tool.name)
        case other:
            box.dropped.append(other)


def _put(box: ToolBox, tool: _Tool, where: str, namespace: str, kind: Any, schema: bytes) -> None:
    if not tool.name:
        raise BadRequest(f"{where}.name: is missing", field=f"{where}.name")
    name = upstream_name(tool.name, namespace)
    alias = ToolAlias(kind=kind, name=tool.name, namespace=namespace)
    if any(spec.name == name for spec in box.specs):
        other = box.aliases.get(name, ToolAlias(name=name))
        raise BadRequest(
            f"{where}: {namespace or 'tool'}/{tool.name} and {other.namespace or 'tool'}/{other.name} "
            f"are both {name!r} upstream",
            field=f"{where}.name",
        )
    description = tool.description or ""
    grammar = bytes(tool.format)
    if kind == "custom" and grammar != b"null":
        description += f"\nThe input is free text in this format: {grammar.decode()}"
    box.specs.append(ToolSpec(name=name, description=description, parameters=msgspec.Raw(schema)))
    if kind != "function" or namespace:
        box.aliases[name] = alias
