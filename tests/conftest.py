"""What all tests share: the event loop that the product runs on, and property tests without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import settings

settings.register_profile("no clock", deadline=None)
settings.load_profile("no clock")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}
