"""POST /v1/models/load and its like over real sockets, and the list through the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import trio
from trio.testing import wait_all_tasks_blocked

from tests.actors.test_model_manager import manager_of
from tests.web.serving import Served, ask, exchange, get, post, serving, serving_manager
from tests.web.test_several_models import serving_several
from trouper import ServerSettings


async def operate(served: Served, name: str, **body: Any) -> tuple[int, Any]:
    return await ask(served, body, f"/v1/models/{name}")


def events_of(body: bytes) -> list[tuple[str, Any]]:
    text = body.decode()
    names = [
        line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")
    ]
    data = [
        json.loads(line.removeprefix("data: "))
        for line in text.splitlines()
        if line.startswith("data: ")
    ]
    return list(zip(names, data, strict=True))


async def test_sleep_wake_unload_load_and_what_is_listed() -> None:
    async with serving_several("small", "middle") as served:
        for name, state in (
            ("sleep", "asleep"),
            ("wake", "ready"),
            ("unload", "unloaded"),
            ("load", "ready"),
        ):
            status, body = await operate(served, name, model="middle")
            assert (status, body["state"], body["loaded"]) == (200, state, state == "ready"), name
        status, body = await operate(served, "load", model="middle", pinned=True, ttl_s=60)
        assert (status, body["pinned"], body["ttl_s"], body["weights_bytes"]) == (200, True, 60, 20)
        status, body = await operate(served, "unload", model="middle")
        assert (status, body["error"]["code"]) == (409, "model_pinned")
        status, body = await operate(served, "pin", model="middle", pinned=False)
        assert (status, body["pinned"]) == (200, False)
        status, body = await operate(served, "load", model="nobody")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_server_without_a_loaded_model_is_ready() -> None:
    async with serving_several("small") as served:
        assert (await operate(served, "sleep"))[0] == 200
        status, _, body = await exchange(served, get("/readyz"))
        assert status == 200 and b"no model is loaded" in body
        assert (await exchange(served, get("/health")))[0] == 200
        status, answer = await ask(served, {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        assert status == 200 and answer["model"] == "small"


async def test_a_server_that_unloads_one_model_for_another_is_ready() -> None:
    async with (
        manager_of("small", "middle") as (manager, _),
        serving_manager(manager, ServerSettings(port=0)) as port,
    ):
        middle = manager.models[1]
        assert middle.runtime is not None

        async def readiness() -> int:
            return (
                await trio.to_thread.run_sync(lambda: httpx2.get(f"http://127.0.0.1:{port}/readyz"))
            ).status_code

        middle.state, middle.runtime.draining = "unloading", True
        assert await readiness() == 200
        middle.state = "ready"
        assert await readiness() == 503, "the server drains"
        middle.runtime.draining = False


async def test_progress_is_streamed_and_so_is_what_failed() -> None:
    async with serving_several("small", "large", "middle") as served:
        _, headers, body = await exchange(
            served, post("/v1/models/load", {"model": "middle", "stream": True})
        )
        assert headers["content-type"].startswith("text/event-stream")
        events = events_of(body)
        assert {name for name, _ in events[:-1]} == {"progress"}
        assert [events[0][1]["id"], events[-1][0], events[-1][1]["state"]] == [
            "middle",
            "model",
            "ready",
        ]
        await operate(served, "pin", model="middle")
        _, _, body = await exchange(
            served, post("/v1/models/load", {"model": "large", "stream": True})
        )
        name, error = events_of(body)[-1]
        assert (name, error["error"]["code"]) == ("error", "insufficient_memory")


async def test_the_openai_client_lists_models_and_loads_them() -> None:
    async with (
        manager_of("small", "middle") as (manager, _),
        serving_manager(manager, ServerSettings(port=0)) as port,
    ):
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            _strict_response_validation=True,
            max_retries=0,
        )

        def act() -> tuple[list[str], list[Any]]:
            states = []
            for path in ("/models/sleep", "/models/load"):
                model = client.post(path, cast_to=openai.types.Model, body={"model": "middle"})
                states.append(model.to_dict()["state"])
            return [model.id for model in client.models.list()], [
                *states,
                client.models.retrieve("middle").id,
            ]

        with trio.fail_after(60):
            assert await trio.to_thread.run_sync(act) == (
                ["small", "middle"],
                ["asleep", "ready", "middle"],
            )


async def test_the_model_of_an_embedding_program_is_its_own() -> None:
    async with serving() as served:
        assert (await operate(served, "load"))[1]["state"] == "ready"
        for name in ("unload", "sleep", "pin"):
            status, body = await operate(served, name)
            assert (status, body["error"]["code"]) == (409, "model_not_managed")


async def test_only_admins_operate_and_on_the_models_of_their_list_only(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-plain\nsk-admin name=boss admin=true models=middle\n")
    async with serving_several(
        "small", "middle", server=ServerSettings(port=0, api_key_file=file)
    ) as served:
        for key, model, expected in (
            ("sk-wrong", "middle", (401, "invalid_api_key")),
            ("sk-plain", "middle", (403, "missing_right")),
            ("sk-admin", "small", (404, "model_not_found")),
        ):
            for name in ("load", "wake", "unload", "sleep", "pin"):
                body = {"model": model}
                status, answer = await ask(
                    served, body, f"/v1/models/{name}", f"Authorization: Bearer {key}\r\n"
                )
                assert (status, answer["error"]["code"]) == expected
        status, answer = await ask(
            served, {}, "/v1/models/sleep", "Authorization: Bearer sk-admin\r\n"
        )
        assert (status, answer["id"], answer["state"]) == (200, "middle", "asleep"), (
            "the default model of the key"
        )


async def test_health_says_that_a_model_is_unloaded_and_not_that_the_server_shuts_down() -> None:
    async with (
        manager_of("small", "middle") as (manager, _),
        serving_manager(manager, ServerSettings(port=0)) as port,
    ):

        async def health() -> Any:
            return (
                await trio.to_thread.run_sync(lambda: httpx2.get(f"http://127.0.0.1:{port}/health"))
            ).json()

        lease = await manager.lease("small")
        for sleep, doing in ((True, "put to sleep"), (False, "unloaded")):
            leaving = manager.control.unload("small", sleep=sleep)
            await wait_all_tasks_blocked()
            seen = await health()
            assert seen["status"] == "ok", "another model serves"
            small = seen["models"]["small"]
            assert (small["state"], small["status"]) == ("unloading", "unloading")
            assert (
                small["detail"]
                == f"the model is being {doing}; a request for it waits, and loads it again"
            )
            runtime = lease.runtime
            lease.release()
            await leaving.done.wait()
            assert (runtime.health().status, runtime.problem_of_end().code) == (
                "unloading",
                "model_unloading",
            )
            lease = await manager.lease("small")
        lease.release()
        assert await manager.drain(5)
        assert lease.runtime.health().detail == "the server is shutting down"


async def test_a_model_that_is_alone_and_unloaded_is_no_server_that_shuts_down() -> None:
    async with (
        manager_of("small") as (manager, _),
        serving_manager(manager, ServerSettings(port=0)) as port,
    ):
        lease = await manager.lease("small")
        manager.control.unload("small")
        await wait_all_tasks_blocked()

        async def seen(path: str) -> httpx2.Response:
            return await trio.to_thread.run_sync(
                lambda: httpx2.get(f"http://127.0.0.1:{port}/{path}")
            )

        health, ready = (await seen("health")).json(), await seen("readyz")
        assert health["status"] == "unloading" and "being unloaded" in health["detail"]
        assert ready.status_code == 200, "a request loads it again"
        assert ready.json() == {
            "status": "ok",
            "detail": "the model is being unloaded; a request loads it again",
        }
        lease.release()
