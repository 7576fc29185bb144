"""Files and batches through the official client, in strict mode."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from openai.types import Batch
from openai.types.batch_request_counts import BatchRequestCounts

from tests.web.batching import (
    CHAT,
    ended,
    lines,
    output,
    request,
    started,
    stored_answers,
    strict,
)
from tests.web.serving import Served, ask, eventually, exchange, get, post, serving
from trouper.web.batches import batch_routes
from trouper.web.batches.input_lines import MAX_ERRORS


async def using(
    served: Served, function: Callable[[openai.OpenAI], object], key: str = "none"
) -> None:
    with strict(served.base_url, key) as client:
        await trio.to_thread.run_sync(function, client)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("choices", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    "/v1/completions": ("choices", {"prompt": "x", "max_tokens": 2}),
    "/v1/embeddings": ("data", {"input": "x"}),
    "/v1/responses": ("output", {"input": "x", "max_output_tokens": 2}),
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_each_endpoint_answers_as_it_does_by_http(endpoint: str, tmp_path: Path) -> None:
    name, body = BODIES[endpoint]

    def use(client: openai.OpenAI) -> None:
        requests = [request(f"r{n}", body, endpoint) for n in range(20)]
        batch = ended(client, started(client, requests, endpoint, metadata={"a": "b"}))
        assert (batch.status, batch.metadata, batch.error_file_id) == (
            "completed",
            {"a": "b"},
            None,
        )
        assert batch.request_counts is not None
        assert (
            batch.request_counts.total,
            batch.request_counts.completed,
            batch.request_counts.failed,
        ) == (20, 20, 0)
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        found = output(client, batch.output_file_id)
        assert found.keys() == {f"r{n}" for n in range(20)}
        direct = client.post(endpoint.removeprefix("/v1"), body=body, cast_to=object)
        assert isinstance(direct, dict)
        for line in found.values():
            assert line["error"] is None and line["response"]["status_code"] == 200
            assert line["response"]["request_id"] and line["id"].startswith("batch_req_")
            assert shape(line["response"]["body"][name]) == shape(direct[name])

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


def shape(value: Any) -> Any:
    """A value without what is random in it: ids."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items() if key != "id"}
    return [shape(inner) for inner in value] if isinstance(value, list) else value


async def test_files(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        assert (client.files.list().data, client.batches.list().data) == ([], [])
        content = lines([request("ä" * 50_000) for _ in range(30)])
        made = [
            client.files.create(file=(f"{n}.jsonl", content), purpose="batch") for n in range(5)
        ]
        assert (made[0].bytes, made[0].filename, made[0].purpose) == (
            len(content),
            "0.jsonl",
            "batch",
        )
        assert client.files.retrieve(made[0].id) == made[0]
        assert client.files.content(made[0].id).content == content
        assert [file.id for file in client.files.list(limit=2)] == [
            file.id for file in made[::-1]
        ], "through pages"
        assert [file.id for file in client.files.list(order="asc", limit=3)] == [
            file.id for file in made
        ]
        assert client.files.list(purpose="batch_output").data == []
        assert client.files.delete(made[0].id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="GET /v1/files"):
                call(made[0].id)
        with pytest.raises(openai.NotFoundError, match="after"):
            client.files.list(after=made[0].id)
        with pytest.raises(openai.BadRequestError, match="purpose must be one of"):
            client.files.create(file=b"x", purpose="assistants")

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)
    assert len([*(tmp_path / "files").iterdir()]) == 4, "and nothing of those that are not"


async def test_a_wrong_line_fails_the_batch_and_is_named(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str, str | None]] = [
        (b"{\n", "invalid_json_line", None),
        (b"[]\n", "invalid_type", None),
        ({"custom_id": "a"}, "missing_required_parameter", "method"),
        (request("b") | {"method": "GET"}, "invalid_method", "method"),
        (request("c", url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (request("d") | {"custom_id": 5}, "invalid_type", "custom_id"),
        (request(""), "invalid_custom_id", "custom_id"),
        (request("x"), "duplicate_custom_id", "custom_id"),
        (request("e", {"stream": True}), "unsupported_parameter", "body.stream"),
        (request("f", {"background": True}), "unsupported_parameter", "body.background"),
    ]

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, [request("x"), *(line for line, *_ in wrong)]))
        assert (batch.status, batch.output_file_id) == ("failed", None) and batch.failed_at
        assert batch.errors is not None and batch.errors.data is not None
        found = [(error.line, error.code, error.param) for error in batch.errors.data]
        assert found == [(n, code, param) for n, (_, code, param) in enumerate(wrong, 2)]
        assert all(f"line {error.line}" in str(error.message) for error in batch.errors.data)
        for requests, code in (
            ([b"\n"], "empty_file"),
            ([b" " * 3000], "line_too_large"),
            ([request("a", {"model": "other"})], "model_not_found"),
        ):
            errors = ended(client, started(client, requests)).errors
            assert errors is not None and errors.data is not None
            assert [error.code for error in errors.data] == [code]

    async with serving(batch_dir=tmp_path, max_body_bytes=2000, model_alias=("off",)) as served:
        await using(served, use)


async def test_a_directory_of_others_among_the_files_harms_none(tmp_path: Path) -> None:
    (tmp_path / "files" / "lost+found").mkdir(parents=True)
    (tmp_path / "files" / "link").symlink_to("nowhere")

    def use(client: openai.OpenAI) -> None:
        file = client.files.create(file=("in.jsonl", lines([request("a")])), purpose="batch")
        assert [each.id for each in client.files.list()] == [file.id]

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)
    assert (tmp_path / "files" / "lost+found").is_dir()


async def test_a_file_of_unknown_models_has_as_many_errors_as_any_other(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        unknown = [request(str(number), {"model": f"m{number}"}) for number in range(150)]
        errors = ended(client, started(client, unknown)).errors
        assert errors is not None and errors.data is not None
        assert [error.line for error in errors.data] == [*range(1, MAX_ERRORS + 1)]

    async with serving(batch_dir=tmp_path, model_alias=("off",)) as served:
        await using(served, use)


async def test_what_an_endpoint_refuses_is_in_the_error_file(tmp_path: Path) -> None:
    """With the endpoint's own message; it may also read past what validation looks at."""
    usual = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    bodies: dict[str, Any] = {
        "good": usual,
        "past": usual | {"background": "x"},
        "bad": {"messages": [], "max_tokens": "x"},
        "model": usual | {"model": 5},
        "stream": usual | {"stream": "x"},
        "extra": usual | {"extra_body": {"stream": 1}},
    }

    errors = dict[str, Any]()

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, [request(*line) for line in bodies.items()]))
        assert batch.status == "completed"
        assert output(client, batch.output_file_id).keys() == {"good", "past"}
        errors.update(output(client, batch.error_file_id))

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)
        assert len(errors) == 4
        for custom_id, line in errors.items():
            _, _, answer = await exchange(served, post(CHAT, bodies[custom_id]))
            response = line["response"]
            assert (response["status_code"], line["error"]) == (400, None)
            assert response["body"] == json.loads(answer)


async def test_a_batch_and_a_file_are_seen_by_their_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a name=a\nsk-b name=b\nsk-c\n")

    async with serving(batch_dir=tmp_path / "batches", api_key_file=file) as served:
        clients = [strict(served.base_url, key) for key in ("sk-a", "sk-b", "sk-c")]

        def use() -> None:
            batches = [ended(client, started(client, [request("r")])) for client in clients]
            assert [batch.status for batch in batches] == ["completed"] * 3, "it runs as its key"
            for client, batch in zip(clients, batches, strict=True):
                assert [one.id for one in client.batches.list()] == [batch.id]
                assert {one.id for one in client.files.list()} == {
                    batch.input_file_id,
                    batch.output_file_id,
                }
                for other in batches:
                    if other is not batch:
                        check_unseen(client, other)

        await trio.to_thread.run_sync(use)
        for client in clients:
            client.close()
    assert b"sk-" not in b"".join(
        path.read_bytes() for path in (tmp_path / "batches").rglob("*") if path.is_file()
    )


def check_unseen(client: openai.OpenAI, other: Batch) -> None:
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="GET /v1/batches"):
            call(other.id)
    for use in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="GET /v1/files"):
            use(str(other.output_file_id))
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.batches.create(
            input_file_id=other.input_file_id, endpoint="/v1/embeddings", completion_window="24h"
        )


LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


async def test_cancelling_keeps_what_is_answered(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        batch = started(client, [request("short"), *(request(f"long {n}", LONG) for n in range(5))])
        while (client.batches.retrieve(batch.id).request_counts or counts(0)).completed < 1:
            pass
        with pytest.raises(openai.BadRequestError, match="cancel the batch"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = ended(client, batch)
        assert (batch.status, batch.error_file_id) == ("cancelled", None) and batch.cancelling_at
        assert output(client, batch.output_file_id).keys() == {"short"}
        assert client.batches.cancel(batch.id) == batch, "it stays as it is"
        assert client.files.delete(batch.input_file_id).deleted

    async with serving(batch_dir=tmp_path, batch_rows=3) as served:
        await using(served, use)
        await eventually(lambda: not served.busy)


def counts(completed: int) -> BatchRequestCounts:
    return BatchRequestCounts(total=0, completed=completed, failed=0)


async def test_a_batch_goes_on_after_a_restart_and_repeats_nothing(tmp_path: Path) -> None:
    requests = [request(f"r{n}") for n in range(60)] + [request("long", LONG | {"max_tokens": 500})]
    submitted: list[str] = []

    async with serving(batch_dir=tmp_path, batch_rows=2) as served:
        client = strict(served.base_url)
        batch = await trio.to_thread.run_sync(started, client, requests)
        retrieve = partial(client.batches.retrieve, batch.id)
        while ((await trio.to_thread.run_sync(retrieve)).request_counts or counts(0)).completed < 6:
            pass
    first = stored_answers(tmp_path, batch.id)
    assert 5 < len(first) < len(requests)
    async with serving(
        batch_dir=tmp_path, observers=(lambda record: submitted.append(record.request_id),)
    ) as served:
        client = strict(served.base_url)
        seen = await trio.to_thread.run_sync(ended, client, batch)
        found = await trio.to_thread.run_sync(output, client, seen.output_file_id)
    assert seen.status == "completed"
    assert found.keys() == {line["custom_id"] for line in requests}
    assert len(submitted) == len(requests) - len(first), "what had an answer did not run again"
    assert {
        number: found[line["custom_id"]]["id"]
        for number, line in enumerate(requests)
        if number in first
    } == first


async def test_what_is_over_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_routes, "window_s", lambda _: 0)

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, [request("a"), request("b")]))
        assert batch.status == "expired" and batch.expired_at
        found = output(client, batch.output_file_id) | output(client, batch.error_file_id)
        assert found.keys() == {"a", "b"}
        assert {line["error"]["code"] for line in output(client, batch.error_file_id).values()} == {
            "batch_expired"
        }

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


async def test_a_directory_has_one_server(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path) as served:
        await using(served, lambda client: started(client, [request("a")]))
        async with serving(batch_dir=tmp_path) as other:

            def use(client: openai.OpenAI) -> None:
                with pytest.raises(openai.InternalServerError, match="another --batch-dir"):
                    client.files.list()

            await using(other, use)


async def test_sizes_are_bounded(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        client.files.create(file=b"x" * 3000, purpose="batch")
        for size, flag in ((4001, "--max-file-bytes"), (2500, "--batch-max-bytes")):
            with pytest.raises(openai.APIStatusError, match=flag) as refused:
                client.files.create(file=b"x" * size, purpose="batch")
            assert refused.value.status_code == 413
        assert len(client.files.list().data) == 1

    async with serving(batch_dir=tmp_path, max_file_bytes=4000, batch_max_bytes=5000) as served:
        await using(served, use)
    assert len([*(tmp_path / "files").iterdir()]) == 1


async def test_without_batches_there_is_nothing(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path / "none", no_batches=True) as served:
        assert (
            (await exchange(served, get("/v1/files")))[0]
            == (await ask(served, {}, "/v1/batches"))[0]
            == 404
        )
    async with serving(batch_dir=tmp_path / "none") as served:
        assert (await exchange(served, get("/v1/files")))[0] == 200
        health = json.loads((await exchange(served, get("/health")))[2])
    assert health["batches"]["problem"] == ""
    assert not (tmp_path / "none").exists()


FORM = "Content-Type: multipart/form-data; boundary=b\r\n"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
END = b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (PURPOSE + FILE + END, FORM, 200, None),
        (FILE + PURPOSE + END + b"\r\nafter", FORM, 200, None),
        (PURPOSE + END, FORM, 400, "missing_required_parameter"),
        (FILE + END, FORM, 400, "missing_required_parameter"),
        (PURPOSE + FILE, FORM, 400, "invalid_form"),
        (PURPOSE + FILE[:20], FORM, 400, "invalid_form"),
        (PURPOSE + PURPOSE + FILE + END, FORM, 400, "invalid_form"),
        (PURPOSE + FILE + FILE + END, FORM, 400, "invalid_form"),
        (PURPOSE + FILE.replace(b'; filename="f"', b"") + END, FORM, 400, "invalid_form"),
        (
            PURPOSE + b"--b\r\nContent-Type: text/plain\r\n\r\n{}\r\n" + END,
            FORM,
            400,
            "invalid_form",
        ),
        (
            PURPOSE.replace(b"purpose", b"expires_after[seconds]") + PURPOSE + FILE + END,
            FORM,
            400,
            "unsupported_parameter",
        ),
        (b"x" * 10**6, FORM, 400, "invalid_form"),
        (b"", FORM, 400, "invalid_form"),
        (b"{}", "Content-Type: application/json\r\n", 415, "unsupported_media_type"),
        (
            PURPOSE + FILE + END,
            "Content-Type: multipart/form-data\r\n",
            415,
            "unsupported_media_type",
        ),
    ],
)
async def test_forms(
    body: bytes, headers: str, status: int, code: str | None, tmp_path: Path
) -> None:
    async with serving(batch_dir=tmp_path) as served:
        seen, _, answer = await exchange(served, post("/v1/files", body, headers))
        assert (seen, json.loads(answer).get("error", {}).get("code")) == (status, code), answer
    stored = [*(tmp_path / "files").iterdir()] if (tmp_path / "files").exists() else []
    assert len(stored) == (1 if status == 200 else 0)


async def test_a_form_is_for_files_only(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path) as served:
        assert (await exchange(served, post("/v1/batches", PURPOSE + FILE + END, FORM)))[0] == 415
