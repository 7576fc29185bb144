"""Lines of a batch that would be streamed, or answered later: in the form of other clients, too."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
import trio

from tests.web.batching import CHAT, ended, lines, output, request, started
from tests.web.serving import eventually, pace, serving
from tests.web.test_batch_faults import WithAdapter
from tests.web.test_batches import using
from trouper.web.batches import batch_worker
from trouper.web.batches.batch_worker import BatchWorker
from trouper.web.batches.input_lines import InputLines, _Validation, validated

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize("name", ["stream", "background"])
async def test_what_would_be_streamed_fails_the_batch_in_extra_body_too(
    name: str, tmp_path: Path
) -> None:
    requests = [request("a"), request("b", BODY | {"extra_body": {name: True, "top_k": 3}})]
    requests.append(request("c", BODY | {"extra_body": {name: False}}))

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, requests))
        assert (
            batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        )
        [error] = batch.errors.data
        assert (error.code, error.line, error.param) == (
            "unsupported_parameter",
            2,
            f"body.extra_body.{name}",
        )

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


async def test_an_answer_that_is_no_json_is_an_error_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log it would be a record that cannot be read: the batch would never end, and be lost
    at the next start."""

    def unchecked(path: Path, endpoint: str, max_line_bytes: int) -> InputLines:
        monkeypatch.setattr(_Validation, "_body", staticmethod(lambda *_: None))
        return validated(path, endpoint, max_line_bytes)

    monkeypatch.setattr(batch_worker, "validated", unchecked)
    requests = [request("a"), request("b", BODY | {"extra_body": {"stream": True}})]

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, requests))
        assert batch.status == "completed"
        answers, errors = output(client, batch.output_file_id), output(client, batch.error_file_id)
        assert answers.keys() == {"a"} and errors["b"]["response"]["status_code"] == 400
        assert errors["b"]["response"]["body"]["error"]["code"] == "unsupported_parameter"

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


async def test_responses_of_a_batch_do_not_push_out_those_of_conversations(tmp_path: Path) -> None:
    """A batch may have fifty times as many as are kept. Theirs are in its output file."""
    url = "/v1/responses"
    requests = [
        request(f"r{number}", {"input": "hello", "max_output_tokens": 2}, url)
        for number in range(3)
    ]

    def use(client: openai.OpenAI) -> None:
        first = client.responses.create(model="fake", input="hello", max_output_tokens=2)
        batch = ended(client, started(client, requests, url))
        answers = [
            line["response"]["body"] for line in output(client, batch.output_file_id).values()
        ]
        assert [answer["store"] for answer in answers] == [False] * 3
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answers[0]["id"])
        client.responses.create(
            model="fake", input="and?", previous_response_id=first.id, max_output_tokens=2
        )

    async with serving(batch_dir=tmp_path, stored_responses=2) as served:
        await using(served, use)


@pytest.mark.parametrize(
    "extra", [None, "x", [True], {"stream": "yes"}, {"stream": None}, {"top_k": 3}]
)
def test_what_asks_for_no_stream_is_left_to_the_endpoint(extra: object, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines([request("a", BODY | {"extra_body": extra})]))
    assert len(validated(path, CHAT, 2**20)) == 1


async def test_a_huge_name_of_a_model_is_not_said_in_full(tmp_path: Path) -> None:
    """What is wrong with a batch is kept as long as the process lives."""
    name = "x" * 100_000

    def use(client: openai.OpenAI) -> None:
        batch = ended(
            client,
            started(
                client, [request(f"r{end}", BODY | {"model": f"{name}{end}"}) for end in ("", ":b")]
            ),
        )
        assert batch.errors is not None and batch.errors.data is not None
        said = [error.message or "" for error in batch.errors.data]
        assert len(said) == 2 and all("'xxx" in message and len(message) < 400 for message in said)
        for model in (name, f"fake:{name}"):
            with pytest.raises(openai.NotFoundError) as refused:
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "x"}]
                )
            assert len(refused.value.message) < 600

    async with serving(WithAdapter(before_step=pace), batch_dir=tmp_path, strict=True) as served:
        await using(served, use)


async def test_a_batch_that_is_stuck_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again every few seconds, which was a traceback each time."""
    tries, enough = list[int](), 3

    async def fails(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        tries.append(len(tries))
        raise ValueError("another fault" if len(tries) > enough else "a fault")

    monkeypatch.setattr(batch_worker, "RETRY_S", 0.005)
    monkeypatch.setattr(BatchWorker, "_process", fails)
    async with serving(batch_dir=tmp_path) as served:
        await using(served, lambda client: started(client, [request("a")]))
        await eventually(lambda: len(tries) > enough + 2)
    assert caplog.text.count("is stuck") == 2, "once for each fault"
