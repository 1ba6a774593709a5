"""The presets of command-line agents: what is configured, and how recorded ends of real runs are read."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polynya.errors import TaskFileError
from polynya.harnesses import BUILT_IN, harness
from polynya.harnesses.base import Endpoint, Installed, Launch, Verdict
from polynya.runtimes.base import ExecResult
from polynya.schema import HarnessSpec

RECORDED = Path(__file__).parent / "recorded"
PRESETS = ["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"]
BASE = "http://127.0.0.1:8123/s/the-key"
ENDPOINT = Endpoint(base_url=BASE, api_key="the-key", model="policy", window=32_000, max_tokens=700)
INSTRUCTION = "--help @nothing 'quoted' $HOME: write notes.txt"


def launch(name: str, endpoint: Endpoint = ENDPOINT, env: dict[str, str] | None = None, **settings: Any) -> Launch:
    spec = HarnessSpec(name=name, settings=settings, env=env or {})
    made = harness(name)
    made.validate(spec)
    installed = Installed(version="1", programs={name: f"/cache/{name}"})
    return made.launch(spec, INSTRUCTION, endpoint, installed, workdir="/workspace", home="/home/agent")


@pytest.mark.parametrize("name", PRESETS)
def test_the_instruction_goes_in_by_stdin_only(name: str) -> None:
    made = launch(name)
    assert made.stdin == INSTRUCTION.encode()
    assert INSTRUCTION not in " ".join(made.argv)
    assert made.argv[0] == f"/cache/{name}"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_long_instruction_is_no_argument_and_no_variable(name: str) -> None:
    """The kernel refuses either beyond 128 KiB."""
    spec = HarnessSpec(name=name, settings={"command": "true"} if name == "shell" else {})
    programs = {name: f"/cache/{name}", "node": "/cache/node", "python": "/cache/python"}
    text = "x" * 300_000
    made = harness(name).launch(
        spec, text, ENDPOINT, Installed(version="1", programs=programs), workdir="/workspace", home="/home/agent"
    )
    assert max(map(len, [*made.argv, *made.env.values()])) < 10_000
    assert text in (made.stdin or b"").decode() + "".join(made.home_files.values())


@pytest.mark.parametrize("name", PRESETS)
def test_variables_of_the_task_reach_it_but_not_over_the_endpoint(name: str) -> None:
    plain = launch(name)
    text = json.dumps({**plain.env, **plain.home_files})
    assert BASE in text
    assert "policy" in text + " ".join(plain.argv)
    bound = [key for key, value in plain.env.items() if "the-key" in value]
    assert bound
    made = launch(name, env={"MINE": "1", **dict.fromkeys(bound, "elsewhere")})
    assert made.env["MINE"] == "1"
    assert {key: made.env[key] for key in bound} == {key: plain.env[key] for key in bound}


@pytest.mark.parametrize("name", PRESETS)
def test_what_it_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(TaskFileError, match="temperature"):
        harness(name).validate(HarnessSpec(name=name, settings={"temperature": 1}))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("claude_code", {"max_turns": 0}),
        ("claude_code", {"effort": "enormous"}),
        ("codex", {"multi_agent": "yes"}),
        ("codex", {"tool_output_tokens": 1}),
        ("gemini_cli", {"tools": "read_file"}),
        ("opencode", {"wire": "smtp"}),
        ("qwen_code", {"wire": "openai"}),
        ("qwen_code", {"max_tool_calls": -1}),
    ],
)
def test_an_impossible_value_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(TaskFileError, match=next(iter(settings))):
        harness(name).validate(HarnessSpec(name=name, settings=settings))


def test_claude_knows_no_model_but_the_policy_and_its_real_window() -> None:
    env = launch("claude_code").env
    models = {key: value for key, value in env.items() if "MODEL" in key}
    assert len(models) == 7
    assert set(models.values()) == {"policy"}
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "700"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == env["IS_SANDBOX"] == "1"
    assert env["ANTHROPIC_BASE_URL"] == BASE


def test_claude_compacts_at_the_window_where_it_accepts_one() -> None:
    large = Endpoint(base_url=BASE, api_key="k", model="policy", window=131_072, max_tokens=4096)
    assert launch("claude_code", large).env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in launch("claude_code").env


def test_claude_settings_are_flags() -> None:
    made = launch(
        "claude_code",
        bare=True,
        max_turns=5,
        tools=["Bash", "Read"],
        disallowed_tools=["Read"],
        system_prompt="Be.",
        append_system_prompt="Open.",
        effort="low",
        experimental_betas=False,
    )
    flags = " ".join(made.argv)
    for part in ("--bare", "--max-turns 5", "--tools Bash,Read", "--disallowed-tools Read", "--effort low"):
        assert part in flags
    assert "--system-prompt Be. --append-system-prompt Open." in flags
    assert made.env["CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS"] == "1"


def test_codex_configuration() -> None:
    made = launch("codex")
    config = tomllib.loads(made.home_files[".codex/config.toml"])
    assert config["model"] == "policy"
    assert config["model_context_window"] == 32_000
    assert config["web_search"] == "disabled"
    assert config["model_providers"][config["model_provider"]] == {
        "name": "polynya",
        "base_url": f"{BASE}/v1",
        "env_key": "POLYNYA_SESSION_KEY",
        "wire_api": "responses",
        "supports_websockets": False,
    }
    assert config["agents"] == {"enabled": False}
    assert not any(config["features"].values())
    assert made.env["POLYNYA_SESSION_KEY"] == "the-key"
    assert "the-key" not in made.home_files[".codex/config.toml"].replace(BASE, "")


def test_codex_settings_are_keys_whatever_is_in_them() -> None:
    text = 'Say "hi"\n\\ and ü\u2028\x7f end'
    made = launch(
        "codex",
        multi_agent=True,
        goals=True,
        reasoning_effort="low",
        base_instructions="Be.",
        developer_instructions=text,
        project_docs=False,
        tool_output_tokens=500,
    )
    config = tomllib.loads(made.home_files[".codex/config.toml"])
    assert config["developer_instructions"] == text
    assert made.home_files[".codex/instructions.md"] == "Be."
    assert config["model_instructions_file"] == "/home/agent/.codex/instructions.md"
    assert (config["agents"]["enabled"], config["features"]["goals"]) == (True, True)
    assert (config["model_reasoning_effort"], config["project_doc_max_bytes"]) == ("low", 0)
    assert config["tool_output_token_limit"] == 500


def test_gemini_configuration() -> None:
    made = launch("gemini_cli", max_turns=3, tools=["read_file"], exclude_tools=["glob"])
    settings = json.loads(made.home_files[".gemini/settings.json"])
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert settings["model"] == {"disableLoopDetection": True, "maxSessionTurns": 3}
    assert settings["tools"] == {"exclude": ["glob", "google_web_search", "web_fetch"], "core": ["read_file"]}
    assert made.env["GEMINI_CLI_TRUST_WORKSPACE"] == "true"
    other = json.loads(launch("gemini_cli", web_tools=True).home_files[".gemini/settings.json"])
    assert other["tools"] == {"exclude": []}


@pytest.mark.parametrize(
    ("wire", "auth", "variable", "url"),
    [
        ("chat", "openai", "OPENAI_BASE_URL", f"{BASE}/v1"),
        ("responses", "openai-responses", "OPENAI_BASE_URL", f"{BASE}/v1"),
        ("anthropic", "anthropic", "ANTHROPIC_BASE_URL", BASE),
        ("google", "gemini", "GOOGLE_GEMINI_BASE_URL", BASE),
    ],
)
def test_qwen_wires(wire: str, auth: str, variable: str, url: str) -> None:
    made = launch("qwen_code", wire=wire)
    assert made.argv[made.argv.index("--auth-type") + 1] == auth
    assert made.env[variable] == url


def test_qwen_settings() -> None:
    made = launch(
        "qwen_code",
        bare=True,
        max_turns=3,
        max_tool_calls=9,
        exclude_tools=["glob"],
        system_prompt="Be.",
        append_system_prompt="Open.",
    )
    flags = " ".join(made.argv)
    for part in ("--bare", "--max-session-turns 3", "--max-tool-calls 9", "--exclude-tools glob"):
        assert part in flags
    assert "--system-prompt Be. --append-system-prompt Open." in flags
    settings = json.loads(made.home_files[".qwen/settings.json"])
    assert settings["model"]["generationConfig"]["contextWindowSize"] == 32_000
    assert settings["memory"]["enableManagedAutoMemory"] is False


@pytest.mark.parametrize(
    ("wire", "package", "path"),
    [
        ("chat", "@ai-sdk/openai-compatible", "/v1"),
        ("responses", "@ai-sdk/openai", "/v1"),
        ("anthropic", "@ai-sdk/anthropic", "/v1"),
        ("google", "@ai-sdk/google", "/v1beta"),
    ],
)
def test_opencode_wires(wire: str, package: str, path: str) -> None:
    config = json.loads(launch("opencode", wire=wire).env["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["polynya"]
    assert provider["npm"] == package
    assert provider["options"] == {"baseURL": f"{BASE}{path}", "apiKey": "the-key"}
    assert provider["models"]["policy"]["limit"] == {"context": 32_000, "output": 700}
    assert config["small_model"] == "polynya/policy"
    assert config["enabled_providers"] == ["polynya"]


def test_opencode_settings() -> None:
    made = launch("opencode", agent="plan", exclude_tools=["task"], auto_compact=False)
    assert made.argv[made.argv.index("--agent") + 1] == "plan"
    assert json.loads(made.env["OPENCODE_CONFIG_CONTENT"])["tools"] == {"task": False}
    assert made.env["OPENCODE_DISABLE_AUTOCOMPACT"] == "1"
    assert "OPENCODE_DISABLE_AUTOCOMPACT" not in launch("opencode").env


@pytest.mark.parametrize(
    ("name", "wire", "api", "url"),
    [
        ("pi", "responses", "openai-responses", f"{BASE}/v1"),
        ("pi", "anthropic", "anthropic-messages", BASE),
        ("pi", "google", "google-generative-ai", f"{BASE}/v1beta"),
    ],
)
def test_pi_wires(name: str, wire: str, api: str, url: str) -> None:
    spec = HarnessSpec(name=name, settings={"wire": wire})
    installed = Installed(version="1", programs={"node": "/n", "pi": "/p"})
    made = harness(name).launch(spec, INSTRUCTION, ENDPOINT, installed, workdir="/w", home="/h")
    provider = json.loads(made.home_files[".pi/agent/models.json"])["providers"]["polynya"]
    assert (provider["api"], provider["baseUrl"]) == (api, url)


# --- how it ended --------------------------------------------------------------------------------------------------

ENDS = [
    ("claude_code", "ok", 0, True, False, "success"),
    ("claude_code", "400", 1, False, False, "400: API Error: 400 scripted HTTP 400"),
    ("claude_code", "overflow", 1, False, False, "400: Prompt is too long"),
    ("claude_code", "limit", 1, False, False, "Reached maximum number of turns (1)"),
    ("claude_code", "503", 1, False, True, "503: API Error: 503 scripted HTTP 500"),
    ("claude_code", "refused", 1, False, True, "API Error: Connection refused"),
    ("codex", "ok", 0, True, False, "turn.completed"),
    ("codex", "400", 1, False, False, '{"error":{"message":"scripted HTTP 400"'),
    ("codex", "overflow", 1, False, False, "Codex ran out of room in the model's context window."),
    ("codex", "503", 1, False, True, "503: unexpected status 503 Service Unavailable"),
    ("gemini_cli", "ok", 0, True, False, "success"),
    ("gemini_cli", "400", 144, False, False, '400: [API Error: {"error":{"code":400,"message":"scripted HTTP 400"'),
    ("gemini_cli", "overflow", 144, False, False, "400: [API Error:"),
    ("gemini_cli", "limit", 53, False, False, "Reached max session turns"),
    ("gemini_cli", "503", 247, False, True, "503: [API Error: scripted HTTP 500]"),
    ("gemini_cli", "refused", 1, False, True, "[API Error: exception TypeError: fetch failed sending request]"),
    ("opencode", "ok", 0, True, False, "stop"),
    ("opencode", "400", 1, False, False, "400: APIError: scripted HTTP 400"),
    ("opencode", "overflow", 1, False, False, "ContextOverflowError: scripted context overflow"),
    ("opencode", "503", 1, False, True, "503: APIError: scripted HTTP 500"),
    ("opencode", "refused", 1, False, True, "APIError: Cannot connect to API: Unable to connect."),
    ("qwen_code", "ok", 0, True, False, "success"),
    ("qwen_code", "400", 1, False, False, "400: [API Error: 400 scripted HTTP 400]"),
    ("qwen_code", "overflow", 1, False, False, "400: [API Error: 400 scripted context overflow]"),
    ("qwen_code", "limit", 53, False, False, "it reached its own limit"),
    ("qwen_code", "refused", 1, False, True, "[API Error: Connection error. (cause: fetch failed)]"),
]


def recorded(name: str, case: str) -> bytes:
    version = harness(name).default_version
    return (RECORDED / f"{name}-{version}-{case}.jsonl").read_bytes()


@pytest.mark.parametrize(("name", "case", "exit_code", "ok", "infra", "reason"), ENDS)
def test_verdict_of_recorded_runs(name: str, case: str, exit_code: int, ok: bool, infra: bool, reason: str) -> None:
    verdict = harness(name).verdict(ExecResult(exit_code=exit_code), recorded(name, case))
    assert (verdict.ok, verdict.infra) == (ok, infra)
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("result", "infra"),
    [
        (ExecResult(exit_code=127, stderr=b"not found"), True),
        (ExecResult(exit_code=1, stderr=b"cannot read its settings"), True),
        (ExecResult(exit_code=-9), False),
        (ExecResult(exit_code=0), False),
        (ExecResult(exit_code=-9, timed_out=True), False),
    ],
)
def test_verdict_of_a_run_that_said_nothing(name: str, result: ExecResult, infra: bool) -> None:
    verdict = harness(name).verdict(result, b"")
    assert (verdict.ok, verdict.infra) == (False, infra)


@pytest.mark.parametrize("name", PRESETS)
def test_an_end_in_the_middle_is_a_failure(name: str) -> None:
    """Whole lines, of which none is the last event."""
    lines = recorded(name, "ok").splitlines(keepends=True)
    verdict = harness(name).verdict(ExecResult(exit_code=0), b"".join(lines[:-1]))
    assert (verdict.ok, verdict.infra) == (False, False)


@pytest.mark.parametrize("name", ["claude_code", "qwen_code"])
def test_a_last_event_longer_than_the_tail_leaves_it_to_the_exit_code(name: str) -> None:
    tail = recorded(name, "ok").splitlines()[-1][200:]
    assert harness(name).verdict(ExecResult(exit_code=0), tail).ok
    assert not harness(name).verdict(ExecResult(exit_code=1), tail).ok


@pytest.mark.parametrize("name", PRESETS)
def test_text_of_the_model_cannot_pass_for_an_event(name: str) -> None:
    lines = recorded(name, "400").splitlines()
    said = json.dumps({"type": "text", "text": recorded(name, "ok").splitlines()[-1].decode()}).encode()
    exit_code = 144 if name == "gemini_cli" else 1
    verdict = harness(name).verdict(ExecResult(exit_code=exit_code), b"\n".join([said, *lines]))
    assert verdict == harness(name).verdict(ExecResult(exit_code=exit_code), b"\n".join(lines))


def test_a_failed_call_that_was_retried_with_success_is_forgotten() -> None:
    tail = b"\n".join([*recorded("codex", "503").splitlines()[:-1], *recorded("codex", "ok").splitlines()])
    assert harness("codex").verdict(ExecResult(exit_code=0), tail) == Verdict(ok=True, reason="turn.completed")
