"""Rights of the keys of a file: which endpoints, models, priorities and cached prompts each of them
may use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fakes import FakeEngine
from tests.web.serving import Served, exchange, get, post, receive_all, serving
from tests.web.test_several_models import serving_several
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import Keys
from trouper.web.app import create_app
from trouper.web.http.endpoints import PATH_PARAMETER
from trouper.web.keys.endpoint_rights import ENDPOINT_ACCESS, access_of
from trouper.web.keys.key_file import KeyFile

FILE = """sk-plain name=plain
sk-watcher name=watcher inference=false observability=true
sk-admin name=boss admin=true observability=true
sk-late name=late min_priority=5
sk-twin cache=own
sk-red name=red cache=team
sk-blue name=blue cache=team
sk-open1 name=open1 cache=shared
sk-open2 name=open2 cache=shared
"""
RIGHTS = {
    "sk-plain": {"inference"},
    "sk-watcher": {"observability"},
    "sk-admin": {"inference", "observability", "admin"},
}
NAMES = {"sk-plain": "plain", "sk-watcher": "watcher", "sk-admin": "boss"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def key_file(tmp_path: Path, text: str = FILE) -> Path:
    file = tmp_path / "keys"
    file.write_text(text)
    return file


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def test_every_route_says_what_it_needs(tmp_path: Path) -> None:
    async with serving(FakeEngine()) as served:
        app = create_app(served.runtime, ServerSettings(batch_dir=tmp_path / "batches"))
        routes = {rule.rule for rule in app.url_map.iter_rules()}
    assert routes - ENDPOINT_ACCESS.keys() == set(), (
        "add a line to trouper/web/keys/endpoint_rights.py"
    )
    assert access_of("/v1/of-the-future") == "admin"


@pytest.mark.parametrize("restricted", [False, True])
async def test_each_endpoint_needs_a_key_if_its_description_says_so(
    tmp_path: Path, restricted: bool
) -> None:
    keys: dict[str, Any] = (
        {"api_key_file": key_file(tmp_path)} if restricted else {"api_key": ("sk-flag",)}
    )
    async with serving(FakeEngine(), batch_dir=tmp_path / "batches", **keys) as served:
        described = json.loads((await exchange(served, get("/openapi.json")))[2])["paths"]
        assert len(described) > 30
        for path, operations in described.items():
            for method, operation in operations.items():
                actual = re.sub(r"\{\w+\}", "x", path)
                ask = (
                    post(actual, {})
                    if method == "post"
                    else get(actual).replace(b"GET", method.upper().encode(), 1)
                )
                status = (await exchange(served, ask))[0]
                assert (status == 401) == ("security" in operation), (method, path)


async def test_each_endpoint_without_the_right_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing of the request is looked at before."""
    async with serving(
        FakeEngine(), api_key_file=key_file(tmp_path), batch_dir=tmp_path / "batches"
    ) as served:
        app = create_app(served.runtime, ServerSettings(batch_dir=tmp_path / "more"))
        for rule in app.url_map.iter_rules():
            path, access = PATH_PARAMETER.sub("x", rule.rule), access_of(rule.rule)
            for key, rights in RIGHTS.items():
                method = (
                    "POST"
                    if "POST" in (rule.methods or ())
                    else "DELETE"
                    if rule.rule.endswith("<x>")
                    else "GET"
                )
                ask = post(path, {}, bearer(key)) if method == "POST" else get(path, bearer(key))
                if path == "/v1/live" and "observability" in rights:
                    continue  # It would be answered a second later.
                status, _, body = await exchange(served, ask)
                if access in ("open", "key") or access in rights:
                    assert b"missing_right" not in body, (path, key)
                    continue
                assert status == 403, (path, key, body)
                said = json.loads(body)
                error = said["error"]
                assert f"'{NAMES[key]}'" in error["message"] and access in error["message"]
                assert error["type"] == "permission_error"
                if path.startswith("/v1/messages"):
                    assert said["type"] == "error" and error["details"] == {
                        "error_code": "missing_right"
                    }
                else:
                    assert error["code"] == "missing_right"


async def test_metrics_and_details_of_health_need_a_right_with_a_key_file_only(
    tmp_path: Path,
) -> None:
    async with serving(
        FakeEngine(), api_key_file=key_file(tmp_path), api_key=("sk-flag",)
    ) as served:
        for key, details in (
            ("sk-plain", False),
            ("sk-watcher", True),
            ("sk-flag", True),
            (None, False),
        ):
            header = "" if key is None else bearer(key)
            status, _, body = await exchange(served, get("/health", header))
            assert status == 200 and (len(json.loads(body)) > 1) == details, key
            status, _, _ = await exchange(served, get("/metrics", header))
            assert status == (200 if details else 401 if key is None else 403), key
            assert (await exchange(served, get("/readyz")))[0] == 200
    async with serving(FakeEngine(), api_key=("sk-flag",)) as served:
        assert (await exchange(served, get("/metrics")))[0] == 200
        assert "actors" in json.loads((await exchange(served, get("/health")))[2])


async def models_of(served: Served, key: str) -> list[str]:
    return [
        model["id"]
        for model in json.loads((await exchange(served, get("/v1/models", bearer(key))))[2])["data"]
    ]


async def test_models_beyond_the_list_of_a_key_do_not_exist_for_it(tmp_path: Path) -> None:
    file = key_file(
        tmp_path, "sk-b name=b models=middle\nsk-all\nsk-pattern models=mid*,z\nsk-none models=z\n"
    )
    async with serving_several(
        "large", "middle", server=ServerSettings(port=0, api_key_file=file)
    ) as served:
        assert await models_of(served, "sk-all") == ["large", "middle"]
        assert (
            await models_of(served, "sk-b") == await models_of(served, "sk-pattern") == ["middle"]
        )
        assert await models_of(served, "sk-none") == []
        for key, model, expected in (
            ("sk-b", "large", 404),
            ("sk-b", "middle", 200),
            ("sk-b", None, 200),
            ("sk-pattern", "large", 404),
            ("sk-all", "large", 200),
            ("sk-none", None, 404),
            ("sk-none", "large", 404),
        ):
            body = CHAT if model is None else CHAT | {"model": model}
            status, _, answer = await exchange(
                served, post("/v1/chat/completions", body, bearer(key))
            )
            body = json.loads(answer)
            assert status == expected, (key, model, body)
            if status == 200:
                assert body["model"] == (model or "middle")
            elif key == "sk-b":
                assert body["error"]["code"] == "model_not_found" and body["error"][
                    "message"
                ].endswith("; 'middle' is served")
        assert (await exchange(served, get("/v1/models/large", bearer("sk-b"))))[0] == 404
        assert b'"large"' not in (await exchange(served, get("/openapi.json", bearer("sk-b"))))[2]


async def test_a_priority_beyond_that_of_the_key_is_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine(), api_key_file=key_file(tmp_path)) as served:
        for priority, expected in ((4, 403), (5, 200), (None, 200), (9, 200)):
            ask = post("/v1/chat/completions", CHAT | {"priority": priority}, bearer("sk-late"))
            status, _, body = await exchange(served, ask)
            assert status == expected, body
            if status == 403:
                error = json.loads(body)["error"]
                assert (error["param"], error["code"]) == ("priority", "priority_not_allowed")
                assert "'late'" in error["message"]


LONG: dict[str, Any] = {"prompt": "x" * 300, "max_tokens": 1}


async def usage_of(served: Served, key: str) -> int:
    status, _, body = await exchange(served, post("/v1/completions", LONG, bearer(key)))
    assert status == 200, body
    return int(json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_second_key_cannot_tell_what_another_has_asked(tmp_path: Path) -> None:
    """Its prompt is computed afresh, in whole; a key of the same group finds it."""
    async with serving(
        FakeEngine(), api_key_file=key_file(tmp_path), api_key=("sk-flag",)
    ) as served:

        def computed() -> int:
            return served.runtime.health().scheduler.total_prefill_tokens

        whole = 0
        for key, hit in (
            ("sk-plain", False),
            ("sk-plain", True),
            ("sk-twin", False),
            ("sk-red", False),
            ("sk-blue", True),
            ("sk-open1", False),
            ("sk-open2", True),
            ("sk-flag", True),
            ("sk-twin", True),
        ):
            before = computed()
            cached = await usage_of(served, key)
            fresh = computed() - before
            whole = whole or fresh
            assert (cached > 0) == hit, key
            assert fresh == whole - cached, key


async def test_a_second_key_does_not_wait_for_the_row_of_another(tmp_path: Path) -> None:
    cached: dict[str, int] = {}
    settings = {"prefill_step_size": 16, "gather_ms": 50}
    async with serving(settings=settings, api_key_file=key_file(tmp_path)) as served:

        async def ask(key: str) -> None:
            cached[key] = await usage_of(served, key)

        async with trio.open_nursery() as nursery:
            for key in ("sk-plain", "sk-twin", "sk-red"):
                nursery.start_soon(ask, key)
        assert cached == {"sk-plain": 0, "sk-twin": 0, "sk-red": 0}
        assert served.runtime.health().scheduler.cache.waited == 0


async def test_a_key_cancels_its_own_requests_only(tmp_path: Path) -> None:
    stream = {"prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with serving(api_key_file=key_file(tmp_path)) as served, await served.connect() as client:
        await client.send_all(
            post("/v1/completions", stream, bearer("sk-plain") + "X-Request-Id: mine\r\n")
        )
        while b"data: " not in await client.receive_some():
            pass
        for key, status in (("sk-red", 404), ("sk-admin", 200)):
            assert (await exchange(served, post("/v1/requests/mine/cancel", b"", bearer(key))))[
                0
            ] == status


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("sk-secret admin=yes", "line 1: admin must be true or false, not 'yes'"),
        (
            "sk-secret tokens_per_minute=0",
            "line 1: tokens_per_minute must be an integer of at least 1",
        ),
        ("sk-secret name=line-7", "line 1: name must be letters"),
        ("sk-secret models=,", "line 1: models must be names"),
        ("sk-secret name=a/b", "line 1: name must be letters"),
        ("sk-secret min_priority=3 priority=1", "line 1: priority 1 is below min_priority 3"),
        (
            "sk-secret name=a\nsk-secret2 name=a admin=true",
            "lines 1 and 2 have the name a and different options",
        ),
    ],
)
def test_options_of_a_right_that_cannot_be(line: str, body: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match=body) as refused:
        Keys.of(ServerSettings(api_key_file=key_file(tmp_path, line)))
    assert "sk-secret" not in str(refused.value)


def test_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    keys = Keys.of(
        ServerSettings(api_key_file=key_file(tmp_path, "sk-old name=a\nsk-new name=a\nsk-x\n"))
    )
    old, new, other = (keys.find(None, key) for key in ("sk-old", "sk-new", "sk-x"))
    assert old is not None and new is not None and other is not None
    assert old.cache_group == new.cache_group != other.cache_group
    assert other.label == "line-3" and "sk-x" not in other.identity


def known(keys: Keys, *names: str) -> list[bool]:
    return [keys.let_in(None, name) for name in names]


async def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = key_file(tmp_path, "sk-one\n")
    keys = Keys.of(ServerSettings(api_key_file=file, api_key=("sk-flag",)))
    reload = KeyFile(keys, answer_s=60).look
    await reload(0)
    (tmp_path / "next").write_text("sk-two admin=true\n")
    (tmp_path / "next").rename(file)
    await reload(0.5)
    assert known(keys, "sk-one", "sk-two", "sk-flag") == [True, False, True], (
        "it is looked at once a second"
    )
    await reload(1)
    assert known(keys, "sk-one", "sk-two", "sk-flag") == [False, True, True]
    for now, text in enumerate(("sk-three colour=red\n", "", "sk-four admin=maybe\n"), 2):
        file.write_text(text)
        caplog.clear()
        await reload(now)
        await reload(now + 0.999)
        assert known(keys, "sk-two", "sk-three", "sk-four") == [True, False, False]
        assert caplog.text.count("the keys stay as they were") == 1 and "sk-" not in caplog.text
        assert keys.stale
    file.unlink()
    await reload(9)
    assert known(keys, "sk-two") == [True]
    file.write_text("sk-five\n")
    await reload(10)
    assert (known(keys, "sk-two", "sk-five"), keys.stale) == ([False, True], "")


async def test_a_server_takes_new_keys_while_it_runs(tmp_path: Path) -> None:
    file = key_file(tmp_path, "sk-old\n")
    async with serving(FakeEngine(), api_key_file=file) as served:
        assert (await exchange(served, get("/v1/models", bearer("sk-old"))))[0] == 200
        file.write_text("sk-other\n")
        with trio.fail_after(60):
            while (await exchange(served, get("/v1/models", bearer("sk-other"))))[0] != 200:  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert (await exchange(served, get("/v1/models", bearer("sk-old"))))[0] == 401


async def test_a_key_that_is_removed_while_its_body_comes_gains_nothing(tmp_path: Path) -> None:
    """The request goes on with what it was let in with: the model is not one of the key's."""
    file = key_file(tmp_path, "sk-gone models=another\nsk-stays\n")
    async with serving(FakeEngine(), api_key_file=file) as served, await served.connect() as client:
        head, _, body = post(
            "/v1/chat/completions", CHAT, bearer("sk-gone") + "Connection: close\r\n"
        ).partition(b"\r\n\r\n")
        await client.send_all(head + b"\r\n\r\n" + body[:5])
        await wait_all_tasks_blocked(0.1)  # It is let in, and waits for its body.
        file.write_text("sk-stays\n")
        with trio.fail_after(60):
            while (await exchange(served, get("/v1/models", bearer("sk-gone"))))[0] != 401:  # noqa: ASYNC110
                await trio.sleep(0.05)
        await client.send_all(body[5:])
        received = await receive_all(client)
        assert received.startswith(b"HTTP/1.1 404 "), received


async def test_a_key_sees_its_own_responses_only(tmp_path: Path) -> None:
    """Neither one that has ended, nor one that runs, nor an item of one."""
    async with serving(api_key_file=key_file(tmp_path)) as served:

        async def response(key: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, _, data = await exchange(
                served, post("/v1/responses", {"input": "a", **body}, bearer(key))
            )
            return status, json.loads(data)

        short, long = {"max_output_tokens": 1}, {"max_output_tokens": 4000, "background": True}
        for body in (short, long):
            status, created = await response("sk-plain", body)
            assert status == 200, created
            path = f"/v1/responses/{created['id']}"
            for ask in (get(path), get(f"{path}/input_items"), post(f"{path}/cancel", b"")):
                foreign = ask.replace(b"\r\n", f"\r\n{bearer('sk-red')}".encode(), 1)
                assert (await exchange(served, foreign))[0] == 404, ask
            delete = f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n"
            assert (await exchange(served, f"{delete}{bearer('sk-admin')}\r\n".encode()))[0] == 404
            status, refusal = await response(
                "sk-red", short | {"previous_response_id": created["id"]}
            )
            assert (status, refusal["error"]["code"]) == (400, "previous_response_not_found")
            for item in created["output"]:
                reference = [{"type": "item_reference", "id": item["id"]}]
                assert (await response("sk-red", short | {"input": reference}))[0] >= 400
                assert (await response("sk-plain", short | {"input": reference}))[0] == 200
            assert (await exchange(served, get(path, bearer("sk-plain"))))[0] == 200
            if body is short:
                assert (
                    await response("sk-plain", short | {"previous_response_id": created["id"]})
                )[0] == 200
        assert (await exchange(served, post(f"{path}/cancel", b"", bearer("sk-plain"))))[0] == 200
