"""`priority`: in every dialect, and by API key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.web.serving import exchange, post, serving
from trouper import Answer, Generate, Runtime, ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import ApiKey, Keys, keys_in
from trouper.protocol.requests import MAX_PRIORITY, MIN_PRIORITY

MESSAGES = [{"role": "user", "content": "a"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
}
FILE = "sk-plain\nsk-batch priority=7 name=nightly min_priority=0\nsk-first priority=-3\n"


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Generate]:
    """What reaches the runtime."""
    requests: list[Generate] = []
    send = Runtime.send

    async def record(runtime: Runtime, request: Generate, *more: Any) -> Answer:
        requests.append(request)
        return await send(runtime, request, *more)

    monkeypatch.setattr(Runtime, "send", record)
    return requests


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(FILE)
    return file


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_request_has_its_own_priority_or_that_of_its_key(
    path: str, submitted: list[Generate], key_file: Path
) -> None:
    expected = []
    async with serving(api_key_file=key_file) as served:
        for key, default in (("sk-plain", 0), ("sk-batch", 7), ("sk-first", -3)):
            for header in (f"Authorization: Bearer {key}\r\n", f"X-Api-Key: {key}\r\n"):
                for more, priority in (
                    ({}, default),
                    ({"priority": None}, default),
                    ({"priority": 0}, 0),
                ):
                    status, _, answer = await exchange(
                        served, post(path, DIALECTS[path] | more, header)
                    )
                    assert status == 200, answer
                    expected += [priority] * (2 if path == "/v1/completions" else 1)
    assert [request.priority for request in submitted] == expected


@pytest.mark.parametrize("path", DIALECTS)
async def test_any_32_bits_are_a_priority_and_nothing_else(
    path: str, submitted: list[Generate]
) -> None:
    async with serving() as served:
        for priority in (MIN_PRIORITY, 5, MAX_PRIORITY):
            assert (await exchange(served, post(path, DIALECTS[path] | {"priority": priority})))[
                0
            ] == 200
            assert submitted[-1].priority == priority
        count = len(submitted)
        for wrong in (MIN_PRIORITY - 1, MAX_PRIORITY + 1, 10**400, 0.5, "1", True, [1]):
            status, _, answer = await exchange(
                served, post(path, DIALECTS[path] | {"priority": wrong})
            )
            assert status == 400, (wrong, answer)
            assert b"priority" in answer
        assert (
            b"-2147483648 and at most 2147483647"
            in (await exchange(served, post(path, DIALECTS[path] | {"priority": 2**31})))[2]
        )
    assert len(submitted) == count


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("", 0),
        ("priority=7", 7),
        ("priority=-3", -3),
        ("min_priority=-9", -9),
        ("priority=7 min_priority=2", 2),
    ],
)
async def test_a_key_goes_before_no_other_unless_its_line_says_so(
    options: str, least: int, submitted: list[Generate], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sk-a {options}\n")
    async with serving(api_key_file=file) as served:
        for path, body in DIALECTS.items():
            for priority, expected in (
                (least, 200),
                (least + 1, 200),
                (least - 1, 403),
                (MIN_PRIORITY, 403),
            ):
                asked = post(path, body | {"priority": priority}, "Authorization: Bearer sk-a\r\n")
                status, _, answer = await exchange(served, asked)
                assert status == expected, (path, priority, answer)
                assert status == 200 or b"priority_not_allowed" in answer
    assert min(request.priority for request in submitted) == least


async def test_keys_of_the_flag_send_any_priority(submitted: list[Generate]) -> None:
    async with serving(api_key=("sk-a",)) as served:
        body = DIALECTS["/v1/completions"] | {"priority": MIN_PRIORITY}
        assert (await exchange(served, post("/v1/completions", body, "X-Api-Key: sk-a\r\n")))[
            0
        ] == 200
    assert submitted[-1].priority == MIN_PRIORITY


def test_lines_of_a_key_file(tmp_path: Path) -> None:
    """A key may have blanks, and what looks like an option within it: only the last words of a line
    are options."""
    file = tmp_path / "keys"
    file.write_text(
        f"{FILE}  my secret key \n\na=b c\nd==\n\tsk-tab\tname=x\tpriority=-2147483648\n"
    )
    assert [*keys_in(file)] == [
        ApiKey("sk-plain", min_priority=0),
        ApiKey("sk-batch", 7, "nightly", min_priority=0),
        ApiKey("sk-first", -3, min_priority=-3),
        ApiKey("my secret key", min_priority=0),
        ApiKey("a=b c", min_priority=0),
        ApiKey("d==", min_priority=0),
        ApiKey("sk-tab", MIN_PRIORITY, "x", min_priority=MIN_PRIORITY),
    ]
    assert "sk-plain" not in repr([*keys_in(file)])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sk-secret prio=5", "line 2: unknown option 'prio'; there are priority, name"),
        ("sk-secret priority=5 colour=red", "line 2: unknown option 'colour'"),
        ("sk-secret priority=", "line 2: priority must be an integer .*, not ''"),
        ("sk-secret priority=high", "line 2: priority must be an integer .*, not 'high'"),
        ("sk-secret priority=1.5", "line 2: priority must be an integer"),
        (
            "sk-secret priority=2147483648",
            "at least -2147483648 and at most 2147483647, not '2147483648'",
        ),
        ("sk-secret priority=1 priority=2", "line 2: priority is given twice"),
        ("schlüssel priority=1", "a key has a character"),
    ],
)
def test_options_that_cannot_be(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n{line}\n")
    with pytest.raises(SettingsInvalid, match=f"--api-key-file.*{said}") as refused:
        Keys.of(ServerSettings(api_key_file=file))
    assert "sk-secret" not in str(refused.value)
