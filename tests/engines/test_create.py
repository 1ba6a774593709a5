"""Engines by name or address."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

import polynya.engines as engines
from polynya.engines import create_engine
from polynya.engines.compatible import CompatibleEngine
from polynya.engines.llamacpp import LlamaCppEngine
from polynya.engines.scripted import ScriptedEngine
from polynya.errors import ConfigError


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_may_end_in_v1(url: str) -> None:
    engine = create_engine(url, timeout=5, retries=1)
    assert isinstance(engine, CompatibleEngine)
    assert engine.base_url == "http://h:1"
    assert (engine.http.settings.read_timeout, engine.http.settings.retries) == (5, 1)


def test_the_built_in_names() -> None:
    assert isinstance(create_engine("embedded", model="smollm2-135m"), LlamaCppEngine)
    assert isinstance(create_engine("scripted", model="m"), ScriptedEngine)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'vllm' is no engine.*embedded, scripted.*http://localhost"):
        create_engine("vllm")


def test_a_third_party_engine_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="mine", value="polynya.engines.llamacpp:LlamaCppEngine", group=engines.ENTRY_POINT_GROUP)
    broken = EntryPoint(name="broken", value="no_such_module_anywhere:X", group=engines.ENTRY_POINT_GROUP)
    monkeypatch.setattr(engines, "entry_points", lambda group: EntryPoints([entry, broken]).select(group=group))
    assert isinstance(create_engine("mine", model="smollm2-135m"), LlamaCppEngine)
    with pytest.raises(ConfigError, match=r"'broken'.*cannot be loaded"):
        create_engine("broken")
