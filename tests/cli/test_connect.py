"""`trouper connect` against a real server: what it asks, prints, writes and starts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner, Result

from tests.cli.agent_homes import KEY, WITH_FILES, files_in, fill, home, read
from tests.cli.test_other_servers import saying
from tests.fake_images import SeeingEngine
from tests.fakes import ByteTokenizer, FakeEngine
from tests.web.serving import pace, serving
from tests.web.test_long_prompts import LONG, LongEngine
from tests.web.test_several_models import serving_several
from trouper import cli
from trouper.cli.agents.agent import ServedModel
from trouper.cli.agents.coding_agents import BEHAVES_AS, MIN_WINDOW, PI_COMPACTS_FROM
from trouper.cli.agents.merging import plain
from trouper.cli.commands.connect import AGENTS, SYNONYMS
from trouper.cli.exits import USAGE_ERROR
from trouper.protocol.model import LoadedModel
from trouper.protocol.suggested_models import SUGGESTED

__all__ = ["home"]
TROUPER = (sys.executable, "-c", "from trouper.cli import main; main()")
CONTEXT = 4096
"""The fake engine's."""
FAKE_CLIENT = """\
#!{python}
import json, os, sys
print(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}))
"""


async def connect(*arguments: str, url: str = "", **variables: str) -> Result:
    """Run the command in this process."""
    flags = ("--url", url) if url else ()
    run = partial(CliRunner().invoke, cli.main, ["connect", *flags, *arguments], env=variables)
    return await trio.to_thread.run_sync(run)


def stdout_of(outcome: Result) -> str:
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def refusal(outcome: Result) -> str:
    assert outcome.exit_code == USAGE_ERROR, outcome.output
    return outcome.stderr.splitlines()[-1].removeprefix("trouper: ")


# -- what the server has -------------------------------------------------------------------------


@pytest.mark.parametrize("agent", AGENTS)
async def test_each_client_gets_address_model_and_context(agent: str, home: Path) -> None:
    async with serving() as served:
        url = f"http://127.0.0.1:{served.port}"
        shown = stdout_of(await connect(agent, url=url))
    assert f"fake at {url}, context {CONTEXT}, output {CONTEXT // 4}\n" in shown
    assert shown.count(url) > 1
    assert files_in(home) == {}, "nothing is written unless asked for"


@pytest.mark.parametrize("name", ["a b#c", "a?b", "a%20b"])
async def test_a_name_that_an_address_must_escape(name: str, home: Path) -> None:
    async with serving(served_model_name=(name,)) as served:
        shown = stdout_of(await connect("codex", "--name", name, url=served.base_url))
    assert f"{name} at " in shown


async def test_the_context_is_what_one_row_may_have(home: Path) -> None:
    async with serving(settings={"max_kv_size": 2048}) as served:
        shown = stdout_of(await connect("codex", url=served.base_url))
    assert "model_context_window = 2048" in shown
    assert "model_auto_compact_token_limit = 1536" in shown


async def test_no_server() -> None:
    url = "http://127.0.0.1:9"
    line = refusal(await connect("claude", url=url))
    assert (
        line
        == f"no server answers at {url}: start one by `trouper serve`, or say where it is by --url"
    )


LISTED = '{"data": [{"id": "x"}]}'


@pytest.mark.parametrize("body", ["", "[]", '{"data": []}', '{"data": [{}]}', LISTED])
async def test_another_server(body: str) -> None:
    async with saying(models=body) as url:
        assert (
            refusal(await connect("claude", url=url))
            == f"{url} answers, but not as a Trouper server does"
        )


async def test_a_router_that_knows_no_context() -> None:
    """As smg alone: it lists the model, and has no /tokenize."""
    async with saying(models=LISTED, tokenize=None) as url:
        line = refusal(await connect("codex", url=url))
    assert line.startswith(f"{url} is a router that does not say how many tokens x holds, or no ")
    assert "give --url of HAProxy before it, or of a server behind it" in line


async def test_a_model_by_its_name_and_one_that_is_not_there(home: Path) -> None:
    async with serving_several("small", "large") as served:
        outcome = await connect("codex", url=served.base_url)
        assert 'model = "small"' in stdout_of(outcome)
        assert "the server has small, large; --name takes another than the first" in outcome.stderr
        assert 'model = "large"' in stdout_of(
            await connect("codex", "--name", "large", url=served.base_url)
        )
        line = refusal(await connect("codex", "--name", "huge", url=served.base_url))
    assert line == "--name huge: this server has small, large"


async def test_another_name_of_a_model_is_its_name(home: Path) -> None:
    async with serving(served_model_name=("gpt", "other")) as served:
        assert 'model = "gpt"' in stdout_of(
            await connect("codex", "--name", "other", url=served.base_url)
        )


async def test_a_model_that_is_not_loaded_is_loaded_to_know_its_context(home: Path) -> None:
    """`small`, `middle` and `large` do not fit together."""
    async with serving_several("large", "middle") as served:
        shown = stdout_of(await connect("codex", "--name", "middle", url=served.base_url))
    assert f"context {CONTEXT}" in shown


async def test_a_context_that_is_too_short_is_named_and_starts_no_agent(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin", "claude")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    async with serving() as served:
        outcome = await connect("claude", url=served.base_url)
        refused = refusal(await connect("claude", "--run", url=served.base_url))
        unwritten = refusal(await connect("claude", "--write", url=served.base_url))
    assert stdout_of(outcome) and unwritten == refused and not files_in(home)
    first = AGENTS["claude"].first_prompt
    assert first is not None
    assert refused == (
        f"Claude Code's first prompt has about {first.tokens:,} tokens ({first.version}), and this "
        "model holds 4,096 with files and answers: agents need 40,960, as `trouper serve "
        f"{SUGGESTED[0].name}` has; or raise --max-kv-size or --context-length if one of "
        "them is the limit; agents that fit: pi, aider, continue"
    )
    assert refused in outcome.stderr


@attrs.define(eq=False)
class Roomy(FakeEngine):
    """With the context that agents need."""

    async def load(self) -> LoadedModel:
        model = await super().load()
        return attrs.evolve(model, card=attrs.evolve(model.card, context_length=65_536))


class Untaught(ByteTokenizer):
    tool_parser = None


@pytest.mark.parametrize(("agent", "warned"), [("pi", True), ("aider", False)])
async def test_a_model_that_calls_no_tools_is_named(agent: str, warned: bool, home: Path) -> None:
    """aider reads changes out of the text."""
    async with serving(FakeEngine(tokenizer=Untaught(), before_step=pace)) as served:
        outcome = await connect(agent, url=served.base_url)
    assert stdout_of(outcome)
    remedy = f"serve one that was, as `trouper serve {SUGGESTED[0].name}`"
    assert (remedy in outcome.stderr) == warned


# -- keys ----------------------------------------------------------------------------------------


async def test_a_key_that_is_wanted(home: Path) -> None:
    async with serving(Roomy(), api_key=(KEY,)) as served:
        url = f"http://127.0.0.1:{served.port}"
        missing = refusal(await connect("codex", url=url))
        assert missing == f"{url} wants an API key: give --api-key, or set TROUPER_API_KEY"
        wrong = refusal(await connect("codex", "--api-key", "wrong", url=url))
        assert wrong.startswith(f"{url} does not accept this API key")
        for agent in AGENTS:
            for flags in ((), *([("--dry-run",), ("--write",)] if agent in WITH_FILES else [])):
                outcome = await connect(agent, *flags, url=url, TROUPER_API_KEY=KEY)
                assert stdout_of(outcome)
                assert KEY not in outcome.output
        assert (
            read(home / ".codex/config.toml")["model_providers"]["trouper"]["env_key"]
            == "TROUPER_API_KEY"
        )
        reminded = stdout_of(await connect("codex", "--write", "--api-key", KEY, url=url))
        assert "set TROUPER_API_KEY where the client starts: the server's key" in reminded


async def test_a_key_that_is_not_wanted_stands_nowhere(home: Path) -> None:
    async with serving() as served:
        assert stdout_of(await connect("aider", "--write", "--api-key", KEY, url=served.base_url))
    assert read(home / ".aider.conf.yml")["openai-api-key"] == "none"


# -- writing -------------------------------------------------------------------------------------


async def test_write_says_what_it_changed_and_dry_run_what_it_would(home: Path) -> None:
    fill(home)
    before = (home / ".codex/config.toml").read_text()
    async with serving(Roomy()) as served:
        url = f"http://127.0.0.1:{served.port}"
        diff = stdout_of(await connect("codex", "--dry-run", url=url))
        assert (home / ".codex/config.toml").read_text() == before
        written = stdout_of(await connect("codex", "--write", url=url))
        again = stdout_of(await connect("codex", "--write", url=url))
        nothing = stdout_of(await connect("codex", "--dry-run", url=url))
    assert '-model = "gpt-5" # the best\n' in diff
    assert '+model = "fake" # the best\n' in diff
    assert f'+base_url = "{url}/v1"\n' in diff
    assert "approval_policy" not in diff
    assert written.splitlines()[0] == "~/.codex/config.toml: changed"
    assert "  model = 'fake' (was 'gpt-5')" in written
    assert "  model_providers.trouper added" in written
    files = ("~/.codex/config.toml", "~/.codex/trouper-models.json")
    assert again == nothing == "".join(f"{file}: nothing to change\n" for file in files)


async def test_a_bad_file_is_named_and_no_other_is_written(home: Path) -> None:
    (home / ".pi/agent").mkdir(parents=True)
    (home / ".pi/agent/settings.json").write_text("{")
    async with serving() as served:
        line = refusal(await connect("pi", "--write", url=served.base_url))
    assert line.startswith("~/.pi/agent/settings.json: it is not JSON: line 1: ")
    assert line.endswith("; nothing was changed")
    assert set(files_in(home)) == {".pi/agent/settings.json"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_file_that_may_not_be_written(home: Path) -> None:
    (home / ".codex").mkdir(mode=0o500)
    async with serving() as served:
        line = refusal(await connect("codex", "--write", url=served.base_url))
    assert line == "~/.codex/config.toml: Permission denied; it was not changed"


# -- running -------------------------------------------------------------------------------------


def install(directory: Path, program: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / program
    path.write_text(FAKE_CLIENT.format(python=sys.executable))
    path.chmod(0o755)


async def ran(
    agent: str, url: str, *arguments: str, directory: Path, **variables: str
) -> Mapping[str, Any]:
    """What the client gets. A process of its own, since the command becomes the client."""
    environment = (
        os.environ
        | {"PATH": f"{directory}:{os.environ['PATH']}", "ANTHROPIC_API_KEY": "sk-mine"}
        | variables
    )
    command = [*TROUPER, "connect", agent, "--url", url, "--run", *arguments]
    outcome = await trio.run_process(
        command, env=environment, capture_stdout=True, capture_stderr=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    *said, last = outcome.stdout.decode().splitlines()
    return {**json.loads(last), "said": "\n".join(said)}


CHANGED_BY_RUN = {"pi": {".pi/agent/models.json", ".pi/agent/settings.json"}}


@pytest.mark.parametrize("agent", [agent.name for agent in AGENTS.values() if agent.program])
@pytest.mark.long(but=("claude*", "codex*", "opencode*", "aider*", "litellm*", "qwen*"))
async def test_run_starts_the_client_with_what_it_needs(
    agent: str, home: Path, tmp_path: Path
) -> None:
    program = AGENTS[agent].program
    assert program is not None
    install(tmp_path / "bin", program)
    async with serving(LongEngine(), api_key=(KEY,)) as served:
        url = f"http://127.0.0.1:{served.port}"
        client = await ran(
            agent, url, "--", "-p", "hello", directory=tmp_path / "bin", TROUPER_API_KEY=KEY
        )
    given = json.dumps({name: part for name, part in client.items() if name != "said"})
    files = files_in(home)
    assert client["arguments"][-2:] == ["-p", "hello"]
    assert url in given + "".join(files.values())
    assert "fake" in given + "".join(files.values())
    assert not any(KEY in argument for argument in client["arguments"]), "other users can read them"
    own = {name for name in files if not name.startswith(".cache/trouper/agents/")}
    assert own == CHANGED_BY_RUN.get(agent, set())


async def test_a_client_that_cannot_be_started_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells run a script without a first line that says by what; the system does not."""

    def refuse(path: str, *_: object) -> None:
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC), path)

    monkeypatch.setattr(os, "execve", refuse)
    install(tmp_path / "bin", "claude")
    async with serving(LongEngine()) as served:
        line = refusal(
            await connect("claude", "--run", url=served.base_url, PATH=str(tmp_path / "bin"))
        )
    assert line == f"{tmp_path}/bin/claude cannot be started: Exec format error"


@pytest.mark.parametrize("context", [PI_COMPACTS_FROM - 8, PI_COMPACTS_FROM])
def test_pi_has_something_to_compact_in_a_short_context(context: int, home: Path) -> None:
    """pi keeps 20,000 tokens by its own count, which is half of the real one with code."""
    setup = AGENTS["pi"].setup(ServedModel("http://127.0.0.1:8000", "org/m", context))
    [_, settings] = [plain(file.values) for file in setup.files]
    short = context < PI_COMPACTS_FROM
    kept = {"reserveTokens": min(context // 4, 32_768), "keepRecentTokens": context // 8}
    assert settings.get("compaction") == (
        {"modelOverrides": {"trouper/org/m": kept}} if short else None
    )
    assert len(setup.merged_to_run) == 1 + short


async def test_claude_code_gets_no_other_key(home: Path, tmp_path: Path) -> None:
    install(tmp_path / "bin", "claude")
    async with serving(LongEngine()) as served:
        client = await ran("claude", f"http://127.0.0.1:{served.port}", directory=tmp_path / "bin")
    assert "ANTHROPIC_API_KEY" not in client["environment"]
    [_, settings] = client["arguments"]
    assert json.loads(settings)["env"]["ANTHROPIC_AUTH_TOKEN"] == "none"


@pytest.mark.parametrize("context", [MIN_WINDOW - 1, MIN_WINDOW])
def test_claude_code_knows_the_model_where_it_heeds_its_window(context: int, home: Path) -> None:
    """A window below 100,000 tokens reaches Claude Code only with a model that it does not know."""
    [file] = AGENTS["claude"].setup(ServedModel("http://127.0.0.1:8000", "m", context)).files
    settings = plain(file.values)
    [row] = settings["modelPicker"]["options"]
    window = settings["env"].get("CLAUDE_CODE_AUTO_COMPACT_WINDOW")
    assert settings["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context)
    expected = (BEHAVES_AS, str(context)) if context >= MIN_WINDOW else (None, None)
    assert (row.get("behavesAs"), window) == expected


def test_claude_code_does_not_wait_for_a_classifier(home: Path) -> None:
    """In its auto mode Anthropic's servers judge each action; without them it stops at the first.
    Which of the other modes it starts in is the user's own setting."""
    [file] = AGENTS["claude"].setup(ServedModel("http://127.0.0.1:8000", "m", 262_144)).files
    assert plain(file.values)["permissions"] == {"disableAutoMode": "disable"}


async def test_codex_gets_the_model_described(home: Path, tmp_path: Path) -> None:
    """Codex warns about a model that its catalogue lacks, and assumes another context."""
    install(tmp_path / "bin", "codex")
    async with serving(LongEngine()) as served:
        url = f"http://127.0.0.1:{served.port}"
        client = await ran("codex", url, directory=tmp_path / "bin")
        await connect("codex", "--write", url=url)
    [flag] = [part for part in client["arguments"] if part.startswith("model_catalog_json=")]
    written = read(home / ".codex/config.toml")["model_catalog_json"]
    for path in (json.loads(flag.partition("=")[2]), written):
        [model] = read(Path(path))["models"]
        assert (model["slug"], model["context_window"]) == ("fake", LONG)
        assert model["base_instructions"], "Codex takes none without"


OTHER_KEYS = {"COPILOT_PROVIDER_BEARER_TOKEN": "sk-mine", "COPILOT_PROVIDER_WIRE_MODEL": "gpt-5"}


async def test_copilot_sends_no_other_token_and_no_other_name(home: Path, tmp_path: Path) -> None:
    install(tmp_path / "bin", "copilot")
    async with serving(LongEngine()) as served:
        url = f"http://127.0.0.1:{served.port}"
        client = await ran("copilot", url, directory=tmp_path / "bin", **OTHER_KEYS)
    environment = client["environment"]
    assert not OTHER_KEYS.keys() & environment.keys()
    assert environment["COPILOT_MODEL"] == "fake"
    assert environment["COPILOT_PROVIDER_MAX_OUTPUT_TOKENS"] == str(LONG // 4)


async def test_litellm_gets_the_key_without_which_it_does_not_start(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM wants one of its own clients, and refuses those that are easily guessed."""
    install(tmp_path / "bin", "litellm")
    monkeypatch.chdir(tmp_path)
    async with serving(LongEngine()) as served:
        url = f"http://127.0.0.1:{served.port}"
        made = [await ran("litellm", url, directory=tmp_path / "bin") for _ in range(2)]
        own = await ran("litellm", url, directory=tmp_path / "bin", LITELLM_MASTER_KEY="sk-mine")
        printed, written = (
            await connect("litellm", url=url),
            await connect("litellm", "--write", url=url),
        )
    first, second = (client["environment"]["LITELLM_MASTER_KEY"] for client in made)
    assert first.startswith("sk-") and len(first) >= 32 and first != second
    assert f"LITELLM_MASTER_KEY={first}" in made[0]["said"], "who is to use it must know it"
    assert own["environment"]["LITELLM_MASTER_KEY"] == "sk-mine" and "sk-" not in own["said"]
    for outcome in (printed, written):
        assert "LITELLM_MASTER_KEY" in outcome.stdout, "what is started without --run needs it, too"
    assert "supports_reasoning: true" in printed.stdout, (
        "else it refuses thinking before a server sees it"
    )


async def test_any_other_client_gets_variables(home: Path, tmp_path: Path) -> None:
    install(tmp_path / "bin", "my-agent")
    async with serving(LongEngine()) as served:
        client = await ran(
            "cursor", served.base_url, "--", "my-agent", "--fast", directory=tmp_path / "bin"
        )
        assert client["arguments"] == ["--fast"]
        assert client["environment"]["OPENAI_BASE_URL"] == served.base_url
        assert (
            client["environment"]["OPENAI_MODEL"]
            == client["environment"]["ANTHROPIC_MODEL"]
            == "fake"
        )
        line = refusal(
            await connect("generic", "--run", "--", "no-such-agent", url=served.base_url)
        )
    assert line == "no-such-agent is not installed"


async def test_what_is_not_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    async with serving(LongEngine()) as served:
        line = refusal(await connect("codex", "--run", url=served.base_url))
    assert line == "codex is not installed: npm install -g @openai/codex"


# -- the command ---------------------------------------------------------------------------------


async def test_without_a_client_it_lists_them() -> None:
    lines = stdout_of(await connect()).splitlines()
    assert [line.split()[0] for line in lines] == list(AGENTS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("zed", "--run"),
            "Zed takes providers from its settings file only: use --write, and start Zed",
        ),
        (("generic", "--run"), "say what to start: `trouper connect generic --run -- COMMAND`"),
        (("open-webui", "--write"), "Open WebUI keeps its settings in a database"),
        (
            ("generic", "--dry-run"),
            "where a client that is not known has its settings is not known",
        ),
        (("codex", "--write", "--run"), "give one of --write, --dry-run, --undo and --run"),
        (
            ("codex", "--", "exec"),
            "'exec' would be an argument of the client: give --run, which starts it",
        ),
        (("emacs",), "'emacs' is not one of"),
    ],
)
async def test_what_cannot_be_is_refused_before_a_server_is_asked(
    arguments: tuple[str, ...], line: str
) -> None:
    assert line in refusal(await connect(*arguments, url="http://127.0.0.1:9"))


def test_synonyms_are_clients() -> None:
    assert set(SYNONYMS.values()) <= set(AGENTS)


def test_help_names_every_way() -> None:
    shown = subprocess.run(
        [*TROUPER, "connect", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in ("--write", "--dry-run", "--run", "--name", "--url", "--api-key"):
        assert flag in shown


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        ("zed", '"images": true'),
        ("opencode", '"attachment": true'),
        ("continue", "- image_input"),
        ("pi", '"image"'),
        ("openclaw", '"image"'),
        ("litellm", "supports_vision: true"),
        ("kilo", '"attachment": true'),
        ("qwen", '"image": true'),
        ("cline", '"images"'),
        ("aider", '"supports_vision": true'),
        ("vibe", "supports_images = true"),
    ],
)
async def test_clients_hear_that_a_model_reads_images(agent: str, line: str, home: Path) -> None:
    async with serving(SeeingEngine(before_step=pace)) as served:
        assert line in stdout_of(await connect(agent, url=served.base_url))
    async with serving() as served:
        assert line not in stdout_of(await connect(agent, url=served.base_url))


async def test_open_webui_chats_with_what_generates_and_indexes_files_by_the_embedder(
    home: Path,
) -> None:
    embedder = {"id": "bge", "max_model_len": 512, "kind": "embedder"}
    generator = {"id": "chatty", "max_model_len": CONTEXT, "kind": "generator"}
    bodies = {"chatty": json.dumps(generator), "health": '{"status": "ok"}'}
    for listed, indexes in (([embedder, generator], True), ([generator], False)):
        async with saying(models=json.dumps({"data": listed}), **bodies) as url:
            shown = stdout_of(await connect("open-webui", url=url))
        assert "DEFAULT_MODELS=chatty" in shown
        assert ("RAG_EMBEDDING_MODEL=bge" in shown) == indexes
        assert (f"RAG_OPENAI_API_BASE_URL={url}/v1" in shown) == indexes
        # By default each chunk is a request, all at once: more than the server's queue takes.
        assert ("RAG_EMBEDDING_BATCH_SIZE=64" in shown) == indexes
        assert ("RAG_EMBEDDING_CONCURRENT_REQUESTS=2" in shown) == indexes
