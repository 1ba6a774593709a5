"""Builders by name."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from polynya.errors import ConfigError
from polynya.node import builders
from polynya.tokens.builders import BUILDERS


def test_a_builder_of_a_third_party_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="mine", value="polynya.tokens.builders:_a_row_per_call", group=builders.GROUP)
    monkeypatch.setattr(
        builders, "entry_points", lambda group, **more: EntryPoints([entry]).select(group=group, **more)
    )
    assert builders.builder("mine") is BUILDERS["per_request"]
    assert builders.names() == ["mine", "per_request", "prefix_merging"]


def test_an_unknown_builder_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'longest' is unknown.*per_request, prefix_merging"):
        builders.builder("longest")
