"""Parts that are no text, and what of a request the model will not see.

Images go on in order, as data URLs; documents go on as text where they are text. Everything else (audio, video, PDF, files
by id or by URL) is refused by its place in the client's own JSON: an engine fetches and stores nothing for an agent.
Invariant: nothing is left out of the prompt but by a rule of ``DropRule``, and each time it is counted.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from polynya.dialects.base import BadRequest

DropRule = Literal["volatile_system", "foreign_reasoning", "provider_tool", "provider_tool_choice"]
"""``volatile_system``: a system block that changes with every request and says nothing to the model. ``foreign_reasoning``:
thinking that another model signed or encrypted. ``provider_tool``: a tool that the provider itself would run, or the choice of it."""
_TEXT_TYPES = (
    "text/",
    "application/json",
    "application/xml",
    "application/yaml",
    "application/x-yaml",
    "application/toml",
)


T = TypeVar("T")


class Notes(msgspec.Struct):
    """Taken while a request is read."""

    dropped: dict[str, int] = {}
    images: list[str] = []
    """Where they stand, in order."""

    @property
    def taken(self) -> Notes | None:
        """Themselves; None when there are none."""
        return self if self.dropped or self.images else None

    def add(self, others: Notes | None) -> None:
        """Those of the next part of the request."""
        if others is not None:
            self.images += others.images
            for rule, count in others.dropped.items():
                self.dropped[rule] = self.dropped.get(rule, 0) + count

    def drop(self, rule: DropRule, count: int = 1) -> None:
        if count:
            self.dropped[rule] = self.dropped.get(rule, 0) + count


class Read(msgspec.Struct, Generic[T], frozen=True):
    """What one element of a request was read to, and the notes taken there."""

    value: T
    notes: Notes | None = None


def image(notes: Notes, url: str, where: str) -> dict[str, Any]:
    """An upstream image part."""
    if not url.startswith("data:image/"):
        shown = url[:60] or "nothing"
        raise BadRequest(
            f"{where}: {shown!r} is no image that can be passed on; send the image itself, base64-encoded", field=where
        )
    notes.images.append(where)
    return {"type": "image_url", "image_url": {"url": url}}


def blob(notes: Notes, mime_type: str, data: str, where: str) -> dict[str, Any]:
    """A base64 blob as an upstream part: an image, or text."""
    if mime_type.startswith("image/"):
        return image(notes, f"data:{mime_type};base64,{data}", where)
    if not mime_type.startswith(_TEXT_TYPES):
        raise unserved(where, f"a {mime_type or 'file without a type'}")
    try:
        return {"type": "text", "text": base64.b64decode(data, validate=True).decode()}
    except (binascii.Error, UnicodeDecodeError) as exc:
        raise BadRequest(f"{where}: {mime_type} that is no base64 of UTF-8 text: {exc}", field=where) from exc


def data_url(notes: Notes, url: str, where: str) -> dict[str, Any]:
    """The same of a data URL (``data:TYPE;base64,DATA``)."""
    kind, comma, data = url.removeprefix("data:").partition(",")
    if not url.startswith("data:") or not comma:
        raise unserved(where, "a file by URL or without its data")
    mime_type, *options = kind.split(";")
    if "base64" not in options:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return blob(notes, mime_type, data, where)


def refuse_held_elsewhere(fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raises BadRequest for a field that stands for context which the provider keeps: without it the prompt is another.

    ``names``: field → what to send instead.
    """
    for name, instead in names.items():
        if name in fields and bytes(fields[name]) not in (b"null", b"false", b'""', b"[]", b"{}"):
            raise BadRequest(f"{name}: it names what is not kept here; {instead}", field=name)


def unserved(where: str, what: str) -> BadRequest:
    return BadRequest(
        f"{where}: {what} cannot be passed to the model; send text or images with their data", field=where
    )
