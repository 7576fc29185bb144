"""Names that no model has: which model answers, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.actors.test_model_manager import manager_of
from tests.fakes import FakeEngine, card
from tests.web.serving import Served, ask, exchange, get, serving, serving_manager
from tests.web.test_logs import Log, log
from tests.web.test_openapi import described
from trouper import ServerSettings, Settings, SettingsInvalid
from trouper.cli.flags import all_from
from trouper.protocol.model import LoadedModel
from trouper.protocol.names import aliased, aliases_in_use, require_aliases
from trouper.web.serving.model_names import ModelAliases

__all__ = ["log"]
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "hello"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_one_model_answers_to_any_name_and_says_its_own(path: str) -> None:
    async with serving() as served:
        status, body = await ask(served, BODIES[path] | {"model": "claude-opus-5"}, path)
    assert status == 200, body
    assert body.get("model", "fake") == "fake"
    assert ("model" in body) == ("count" not in path and path != "/tokenize")


@pytest.mark.parametrize("path", BODIES)
async def test_off_refuses_them(path: str) -> None:
    async with serving(model_alias=("off",)) as served:
        status, body = await ask(served, BODIES[path] | {"model": "claude-opus-5"}, path)
    assert status == 404
    assert "'claude-opus-5' does not exist here" in str(body)


async def test_aliases_that_are_given_are_the_only_ones() -> None:
    async with serving(model_alias=("claude-*", "gpt-?=fake")) as served:
        for name, status in (
            ("claude-opus", 200),
            ("gpt-5", 200),
            ("gpt-55", 404),
            ("Claude-opus", 404),
        ):
            assert (await ask(served, {"model": name, "prompt": "x", "max_tokens": 1}))[0] == status


@pytest.mark.parametrize(
    ("aliases", "name", "answers"),
    [
        ((), "nobody", None),
        ((), "large", "large"),
        (("claude-*=large",), "claude-opus", "large"),
        (("claude-*=large",), "nobody", None),
        (("claude-*",), "claude-opus", "small"),
        (("claude-haiku*=small", "claude-*=large"), "claude-haiku-5", "small"),
        (("*=large",), "small", "small"),
    ],
)
async def test_of_several_models_aliases_choose(
    aliases: tuple[str, ...], name: str, answers: str | None
) -> None:
    server = ServerSettings(port=0, model_alias=aliases)
    async with (
        manager_of("small", "large") as (manager, _),
        serving_manager(manager, server) as port,
    ):
        runtime = manager.entries()[0].runtime
        assert runtime is not None
        served = Served(port, runtime, None, None)  # type: ignore[arg-type]
        status, body = await ask(served, {"model": name, "prompt": "x", "max_tokens": 1})
    assert (status, body.get("model")) == ((200, answers) if answers else (404, None))


async def test_an_alias_is_for_the_models_of_the_key(tmp_path: Path) -> None:
    """Without a model it means the key's default. What the key may not use does not exist for it,
    nor is it named."""
    file = tmp_path / "keys"
    file.write_text("sk-all\nsk-large models=large\nsk-none models=z\n")
    server = ServerSettings(port=0, api_key_file=file, model_alias=("claude-*=small", "gpt-*"))
    async with (
        manager_of("small", "large") as (manager, _),
        serving_manager(manager, server) as port,
    ):
        served = Served(port, None, None, None)  # type: ignore[arg-type]
        for key, name, answers in (
            ("sk-all", "gpt-5", "small"),
            ("sk-all", "claude-opus", "small"),
            ("sk-large", "gpt-5", "large"),
            ("sk-large", "claude-opus", None),
            ("sk-none", "gpt-5", None),
            ("sk-none", None, None),
        ):
            named = {} if name is None else {"model": name}
            body = {"prompt": "x", "max_tokens": 1} | named
            status, said = await ask(served, body, headers=f"Authorization: Bearer {key}\r\n")
            assert (status, said.get("model")) == ((200, answers) if answers else (404, None)), (
                key,
                name,
                said,
            )
            if answers is None:
                assert said["error"]["code"] == "model_not_found"
                expected = (
                    "'large' is"
                    if key == "sk-large"
                    else "no model is served here that this API key may use"
                )
                assert (
                    expected in said["error"]["message"] and "small" not in said["error"]["message"]
                )


async def test_the_list_of_models_and_one_of_them_are_of_names_that_exist() -> None:
    async with serving() as served:
        assert (await exchange(served, get("/v1/models/claude-opus")))[0] == 404
        assert (await exchange(served, get("/v1/models/fake")))[0] == 200


class OfDirectory(FakeEngine):
    async def load(self) -> LoadedModel:
        return LoadedModel(attrs.evolve(card(), id="/models/own"), self.tokenizer)


async def test_a_model_named_by_its_directory_is_found_by_its_path() -> None:
    async with serving(OfDirectory()) as served:
        for path in ("/v1/models//models/own", "/v1/models/%2Fmodels%2Fown", "/models//models/own"):
            assert (await exchange(served, get(path)))[0] == 200, path
        assert (await exchange(served, get("/v1/models/own")))[0] == 404


async def test_the_first_use_of_a_name_is_logged(log: Log) -> None:
    async with serving() as served:
        for name in ("one\nx", "one\nx", "two", *(f"more-{number}" for number in range(120))):
            await ask(served, {"model": name, "prompt": "x"}, "/tokenize")
    lines = [line["message"] for line in log.lines if "--model-alias" in line["message"]]
    assert lines[:2] == [
        r"no model is named 'one\nx'; fake answers (--model-alias)",
        "no model is named 'two'; fake answers (--model-alias)",
    ]
    assert len(lines) == 100, "clients choose the names"


async def test_names_are_remembered_by_their_beginning() -> None:
    """A hundred names of 30 MB would be 3 GB for as long as the server runs."""
    async with manager_of("small") as (manager, _):
        aliases = ModelAliases(manager, ())
        for end in ("a", "b"):
            assert aliases.resolved("x" * 10_000 + end, manager.entries()) == "small"
        assert sum(map(len, aliases._logged)) < 500


async def test_the_document_says_which_names_are_taken() -> None:
    for aliases, names in (((), None), (("off",), ["fake"]), (("x*",), None)):
        async with serving(model_alias=aliases) as served:
            document = await described(served)
        assert document["components"]["schemas"]["Model"].get("enum") == names


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        (("=small",), "--model-alias '=small' has no pattern"),
        ((" ",), "--model-alias ' ' has no pattern"),
        (("x=huge",), "'huge' is not served"),
        (("off", "x"), "--model-alias off excludes other aliases"),
    ],
)
def test_an_alias_that_could_not_be_used(aliases: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsInvalid, match="--model-alias") as refused:
        require_aliases(["small", "large"], ["big=large"], aliases)
    assert said in str(refused.value)
    given = attrs.asdict(Settings(), recurse=False) | attrs.asdict(ServerSettings(), recurse=False)
    with pytest.raises(SettingsInvalid, match="--model-alias"):
        all_from(given | {"model": ("small", "large"), "model_alias": aliases})


def test_aliases_that_can_be_used() -> None:
    require_aliases(["small", "large"], ["big=large"], ("claude-*=large", "gpt-*=big", "x"))
    require_aliases(["small"], [], ("off",))


def test_which_aliases_are_in_use() -> None:
    assert aliases_in_use((), 1) == ("*",)
    assert aliases_in_use((), 2) == ()
    assert aliases_in_use(("x",), 1) == aliases_in_use(("x",), 2) == ("x",)
    assert aliases_in_use(("off",), 1) == ()


def test_a_pattern_ends_in_linear_time() -> None:
    assert aliased("a" * 5000 + "b", ["*a" * 20 + "c=x"], [("x",)]) is None
