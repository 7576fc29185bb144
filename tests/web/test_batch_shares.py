"""What each key may hold of files and batches, and what an admin may do with those of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.web.batching import ended, lines, request, started, state_copied, strict
from tests.web.serving import Served, exchange, get, post, serving
from tests.web.test_batch_room import UPLOAD
from tests.web.test_batches import END, FORM
from tests.web.test_key_rights import bearer, key_file
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import Keys
from trouper.web.batches import batch_storage, batch_worker
from trouper.web.batches.batch_storage import KeyShares

KEYS = "sk-a name=a\nsk-b name=b\nsk-adm name=boss admin=true\n"


def limit_of(owner: str, **server: Any) -> int:
    return KeyShares(Keys.of(ServerSettings(**server)), 1000).of(owner)[0]


def test_one_client_has_all_and_several_half_each_unless_a_line_says_otherwise(
    tmp_path: Path,
) -> None:
    assert limit_of("") == limit_of("name:of-earlier") == 1000
    assert (
        limit_of("name:a", api_key_file=key_file(tmp_path, "sk-a name=a\nsk-new name=a\n")) == 1000
    )
    assert (
        limit_of("name:a", api_key_file=key_file(tmp_path, "sk-a name=a\n"), api_key=("sk-flag",))
        == 500
    )
    several = key_file(
        tmp_path, "sk-a name=a\nsk-b name=b max_batch_bytes=900\nsk-c max_batch_bytes=5MB name=c\n"
    )
    assert [limit_of(f"name:{name}", api_key_file=several) for name in "abcx"] == [
        500,
        900,
        5_000_000,
        500,
    ]


@pytest.mark.parametrize("value", ["", "many", "-1", "1e9"])
def test_a_share_is_a_size(value: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="line 1"):
        Keys.of(
            ServerSettings(
                api_key_file=key_file(tmp_path, f"sk-a max_batch_bytes={value} name=a\n")
            )
        )


async def sent(
    served: Served, key: str, call: str, body: Any = b"", headers: str = ""
) -> tuple[int, Any]:
    method, path = call.split(" ")
    asked = post(path, body, bearer(key) + headers).replace(b"POST", method.encode(), 1)
    status, _, answer = await exchange(served, asked)
    return status, json.loads(answer)


async def upload(served: Served, key: str, content: bytes) -> tuple[int, Any]:
    return await sent(served, key, "POST /v1/files", UPLOAD + content + b"\r\n" + END, FORM)


async def test_a_key_fills_its_share_and_no_more(tmp_path: Path) -> None:
    file = key_file(tmp_path, KEYS + "sk-c name=c max_batch_bytes=1000\n")
    async with serving(
        api_key_file=file, batch_dir=tmp_path / "batches", batch_max_bytes=10_000
    ) as served:
        status, kept = await upload(served, "sk-a", b"x" * 4000)
        assert status == 200
        status, refused = await upload(served, "sk-a", b"x" * 2000)
        assert (status, refused["error"]["code"]) == (413, "no_room_for_key")
        assert (
            "may take 5000 bytes" in refused["error"]["message"]
            and "max_batch_bytes" in refused["error"]["message"]
        )
        assert (await upload(served, "sk-b", b"x" * 4000))[0] == 200, (
            "another key's share is its own"
        )
        assert [(await upload(served, "sk-c", b"x" * size))[0] for size in (800, 300, 100)] == [
            200,
            413,
            200,
        ]
        status, refused = await upload(served, "sk-adm", b"x" * 3000)
        assert (status, refused["error"]["code"]) == (413, "no_room_for_file"), (
            "the directory is full"
        )
        assert (await sent(served, "sk-a", f"DELETE /v1/files/{kept['id']}"))[0] == 200
        assert (await upload(served, "sk-a", b"x" * 2000))[0] == 200


async def test_a_key_has_so_many_files_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description of each is in memory, also of one without a byte."""
    monkeypatch.setattr(batch_storage, "MAX_FILES", 4)
    monkeypatch.setattr(batch_worker, "AGAIN_S", 600)
    file = key_file(tmp_path, "sk-a name=a requests_per_minute=1\nsk-b name=b\n")
    async with serving(api_key_file=file, batch_dir=tmp_path / "batches") as served:
        await sent(served, "sk-a", "POST /v1/completions", {"prompt": "x", "max_tokens": 1})
        _, first = await upload(served, "sk-a", lines([request("r")]))
        spec = {
            "input_file_id": first["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        status, batch = await sent(served, "sk-a", "POST /v1/batches", spec)
        assert status == 200
        assert [(await upload(served, "sk-a", b""))[0] for _ in range(2)] == [200, 413], (
            "two are for the batch"
        )
        status, refused = await sent(served, "sk-a", "POST /v1/batches", spec)
        assert (status, refused["error"]["code"]) == (413, "too_many_files")
        assert [(await upload(served, "sk-b", b""))[0] for _ in range(5)] == [200] * 4 + [413]
        assert (await sent(served, "sk-a", f"POST /v1/batches/{batch['id']}/cancel"))[0] == 200


async def test_the_ended_batches_of_a_key_are_forgotten_and_not_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_storage, "MAX_ENDED", 2)
    directory = tmp_path / "batches"

    def run(client: openai.OpenAI, times: int) -> list[str]:
        return [ended(client, started(client, [b"no request\n"])).id for _ in range(times)]

    async def listed(served: Served, key: str) -> list[str]:
        return [batch["id"] for batch in (await sent(served, key, "GET /v1/batches"))[1]["data"]]

    async with serving(api_key_file=key_file(tmp_path, KEYS), batch_dir=directory) as served:
        with strict(served.base_url, "sk-b") as b, strict(served.base_url, "sk-a") as a:
            other = await trio.to_thread.run_sync(run, b, 1)
            ids = await trio.to_thread.run_sync(run, a, 5)
        assert await listed(served, "sk-a") == ids[:-4:-1], "the last ended after it was created"
        assert await listed(served, "sk-b") == other
    with state_copied(directory) as connection:
        rows = connection.execute("SELECT id FROM batches")
        assert {batch_id for (batch_id,) in rows} == {*other, *ids[-3:]}
    async with serving(api_key_file=key_file(tmp_path, KEYS), batch_dir=directory) as served:
        assert (await upload(served, "sk-b", b""))[0] == 200
        left = await listed(served, "sk-a")
        assert left == ids[:-3:-1]
        assert await listed(served, "sk-b") == other


async def test_an_admin_lists_deletes_and_cancels_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_worker, "AGAIN_S", 600)
    keys = KEYS.replace("name=a", "name=a requests_per_minute=1")
    async with serving(
        api_key_file=key_file(tmp_path, keys), batch_dir=tmp_path / "batches"
    ) as served:
        await sent(served, "sk-a", "POST /v1/completions", {"prompt": "x", "max_tokens": 1})
        _, file = await upload(served, "sk-a", lines([request("r")]))
        spec = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        _, batch = await sent(
            served, "sk-a", "POST /v1/batches", spec | {"metadata": {"for": "a only"}}
        )
        _, own = await upload(served, "sk-adm", b"x")
        of_file, of_batch = f"/v1/files/{file['id']}", f"/v1/batches/{batch['id']}"
        for key in ("sk-b", "sk-adm"):
            for path in (of_file, f"{of_file}/content", of_batch):
                assert (await exchange(served, get(path, bearer(key))))[0] == 404, (key, path)
            assert (await sent(served, key, "POST /v1/batches", spec))[0] == 404
        assert (await sent(served, "sk-b", f"DELETE {of_file}"))[0] == 404
        assert (await sent(served, "sk-b", f"POST {of_batch}/cancel"))[0] == 404
        for path, owners in (("/v1/files", ["a", "boss"]), ("/v1/batches", ["a"])):
            assert (await sent(served, "sk-b", f"GET {path}"))[1]["data"] == []
            assert "owner" not in (await sent(served, "sk-a", f"GET {path}"))[1]["data"][0]
            seen = (await sent(served, "sk-adm", f"GET {path}"))[1]["data"]
            assert sorted(each["owner"] for each in seen) == owners
            assert b"a only" not in json.dumps(seen).encode()
        page = (await sent(served, "sk-adm", "GET /v1/files?limit=1"))[1]
        assert [page["data"][0]["id"], page["has_more"]] == [own["id"], True]
        assert (await sent(served, "sk-adm", f"DELETE {of_file}"))[1]["error"][
            "code"
        ] == "file_in_use"
        status, cancelled = await sent(served, "sk-adm", f"POST {of_batch}/cancel")
        assert (status, cancelled["owner"], cancelled["metadata"]) == (200, "a", None)
        with strict(served.base_url, "sk-a") as a:
            assert (
                await trio.to_thread.run_sync(lambda: ended(a, a.batches.retrieve(batch["id"])))
            ).status == "cancelled"
        assert (await sent(served, "sk-adm", f"DELETE {of_file}"))[0] == 200
        assert (await sent(served, "sk-a", "GET /v1/files"))[1]["data"] == []


def test_labels_say_whose_also_of_a_key_that_was_removed(tmp_path: Path) -> None:
    keys = Keys.of(
        ServerSettings(api_key_file=key_file(tmp_path, "sk-a\nsk-b name=b\n"), api_key=("sk-flag",))
    )
    line, named, flag = (keys.find(None, key) for key in ("sk-a", "sk-b", "sk-flag"))
    assert line is not None and named is not None and flag is not None
    identities = (line.identity, named.identity, flag.identity, "name:gone", "key:0123", "")
    assert [keys.label_of(each) for each in identities] == [
        "line-1",
        "b",
        "api-key",
        "gone",
        "removed key",
        "",
    ]


async def test_a_key_without_room_holds_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one slot. The requests of the key that has filled its share wait beside it, and go
    on when there is room."""
    monkeypatch.setattr(batch_storage, "ROOM_S", 0.01)
    requests, limit = [request(f"r{number}") for number in range(12)], 50_000
    file = key_file(tmp_path, f"sk-a name=a max_batch_bytes={limit}\nsk-b name=b\n")
    async with serving(api_key_file=file, batch_dir=tmp_path / "batches", batch_rows=1) as served:
        _, filler = await upload(served, "sk-a", b"x" * (limit - len(lines(requests)) - 5000))

        with strict(served.base_url, "sk-a") as a, strict(served.base_url, "sk-b") as b:
            stuck = await trio.to_thread.run_sync(started, a, requests)
            assert (
                await trio.to_thread.run_sync(lambda: ended(b, started(b, requests)))
            ).status == "completed"
            assert (
                await trio.to_thread.run_sync(a.batches.retrieve, stuck.id)
            ).status == "in_progress"
            await trio.to_thread.run_sync(a.files.delete, filler["id"])
            assert (await trio.to_thread.run_sync(ended, a, stuck)).status == "completed"
