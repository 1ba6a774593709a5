"""The scripted engine: predetermined replies in the shape of a real engine's. For tests, faults and load; it is no model."""

from polynya.engines.scripted.app import ScriptedApp
from polynya.engines.scripted.desk import CallRecord, Desk
from polynya.engines.scripted.engine import ScriptedEngine
from polynya.engines.scripted.script import Expected, Fault, Script, ScriptedCall, Step
from polynya.engines.scripted.server import serve

__all__ = [
    "CallRecord",
    "Desk",
    "Expected",
    "Fault",
    "Script",
    "ScriptedApp",
    "ScriptedCall",
    "ScriptedEngine",
    "Step",
    "scripted_app",
    "serve",
]


def scripted_app(script: Script | None = None) -> ScriptedApp:
    """A vLLM-shaped ASGI app that answers by ``script``."""
    return ScriptedApp(script)
