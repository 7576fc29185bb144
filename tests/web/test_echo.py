"""The prompt said again, with its log-probabilities; token ids; running usage. Whole and streamed,
which must agree."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import pytest

from tests.fakes import EOS, FakeEngine
from tests.web.serving import Served, ask, serving
from tests.web.streams import Json, joined, stream
from trouper.web.openai.completion_dialect import CompletionDialect
from trouper.web.streaming.response_streams import LONG_SCORES

PROMPT = "né?"
IDS = [110, 195, 169, 63]


async def both(served: Served, body: Json) -> tuple[list[Json], Json]:
    """The choices and usage of a whole answer, after it was compared with the streamed one."""
    status, whole = await ask(served, body)
    assert status == 200, whole
    chunks = await stream(served, dict(body))
    assert joined(chunks) == whole["choices"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key]
    return whole["choices"], whole["usage"]


async def test_the_prompt_comes_first() -> None:
    async with serving(FakeEngine()) as served:
        [plain], _ = await both(served, {"prompt": PROMPT, "max_tokens": 3})
        [choice], _ = await both(served, {"prompt": PROMPT, "max_tokens": 3, "echo": True})
        [by_ids], _ = await both(served, {"prompt": IDS, "max_tokens": 3, "echo": True})
    assert choice["text"] == PROMPT + plain["text"] == by_ids["text"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
async def test_with_log_probabilities(prompt: Any) -> None:
    async with serving(FakeEngine()) as served:
        [choice], _ = await both(
            served, {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1}
        )
    seen = choice["logprobs"]
    assert seen["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.5, -0.5]
    assert seen["top_logprobs"][0] is None
    assert len(seen["tokens"]) == len(seen["text_offset"]) == len(seen["top_logprobs"]) == 6
    assert seen["tokens"][0] == "n" and "".join(seen["tokens"][4:]) == choice["text"][3:]
    assert seen["text_offset"] == [0, 1, 1, 2, 3, 4], (
        "in characters of the text, of which one has two tokens"
    )


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", [PROMPT, [110], [PROMPT, "b"]])
async def test_nothing_but_the_prompt(prompt: Any, logprobs: int | None) -> None:
    async with serving(FakeEngine()) as served:
        body = {
            "prompt": prompt,
            "max_tokens": 0,
            "echo": True,
            "logprobs": logprobs,
            "return_token_ids": True,
        }
        choices, usage = await both(served, body)
    texts = [prompt] if isinstance(prompt, str) else ["n"] if prompt == [110] else prompt
    assert [choice["text"] for choice in choices] == texts
    assert usage["completion_tokens"] == 0
    for choice in choices:
        assert choice["finish_reason"] == "length" and choice["matched_stop"] is None
        assert choice["token_ids"] == []
        length = len(choice["prompt_token_ids"])
        if logprobs is not None:
            assert len(choice["logprobs"]["tokens"]) == length
        else:
            assert choice["logprobs"] is None


async def test_nothing_but_the_prompt_although_the_answer_would_end() -> None:
    """What is computed behind the prompt says nothing: not its end either."""
    async with serving(FakeEngine(token_at=lambda *_: EOS)) as served:
        body = {
            "prompt": PROMPT,
            "max_tokens": 0,
            "echo": True,
            "logprobs": 1,
            "stop_token_ids": [EOS],
        }
        [choice], usage = await both(served, body)
    assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == (
        PROMPT,
        "length",
        0,
    )


async def test_max_tokens_0_needs_echo() -> None:
    async with serving(FakeEngine()) as served:
        status, body = await ask(served, {"prompt": PROMPT, "max_tokens": 0})
    assert (status, body["error"]["param"]) == (400, "max_tokens")


async def test_each_prompt_before_its_own_answers() -> None:
    async with serving(FakeEngine()) as served:
        body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0}
        choices, usage = await both(served, body)
    assert [choice["text"][:2] for choice in choices] == ["ab", "ab", "cd", "cd"]
    assert usage["prompt_tokens"] == 4 and usage["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", [["ab", "cd"], [[97, 98], [99, 100]]])
async def test_each_prompt_before_the_best_of_its_own(prompt: Any) -> None:
    async with serving(FakeEngine()) as served:
        body = {"prompt": prompt, "n": 2, "best_of": 3, "max_tokens": 2, "echo": True}
        status, whole = await ask(served, body)
    assert status == 200
    assert [choice["text"][:2] for choice in whole["choices"]] == ["ab", "ab", "cd", "cd"]


async def test_an_answer_that_ends_at_once() -> None:
    async with serving(FakeEngine(token_at=lambda *_: EOS)) as served:
        for more in (
            {},
            {"logprobs": 1},
            {"return_token_ids": True},
            {"logprobs": 0, "return_token_ids": True},
        ):
            [choice], _ = await both(
                served, {"prompt": PROMPT, "max_tokens": 5, "echo": True} | more
            )
            assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")


async def test_token_ids() -> None:
    async with serving(FakeEngine()) as served:
        body = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True, "n": 2}
        choices, _ = await both(served, body)
    assert len(choices) == 2
    for choice in choices:
        assert choice["prompt_token_ids"] == IDS
        assert bytes(choice["token_ids"]).decode() == choice["text"]


async def test_token_ids_whose_text_is_held_back() -> None:
    """A stop string that is not completed, half a character: the tokens were there all the same."""
    said = b"ab\xc3"
    async with serving(FakeEngine(token_at=lambda _, place: said[place])) as served:
        body = {
            "prompt": PROMPT,
            "max_tokens": 3,
            "return_token_ids": True,
            "stop": ["bx"],
            "logprobs": 0,
        }
        [choice], _ = await both(served, body)
    assert (choice["text"], choice["token_ids"]) == ("ab�", [*said])
    assert len(choice["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_with_every_chunk(path: str) -> None:
    asked: Json = {"prompt": PROMPT} if path.endswith("/v1/completions") else {}
    asked = asked or {"messages": [{"role": "user", "content": PROMPT}]}
    async with serving(FakeEngine()) as served:
        body = asked | {"max_tokens": 5, "stream_options": {"continuous_usage_stats": True}}
        chunks = await stream(served, body, path)
    assert all(chunk["usage"] is not None for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content")
        for c in chunks
        for choice in c["choices"]
    ]
    assert sum(bool(text) for text in texts) <= 5
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_usage_of_a_prompt_alone() -> None:
    async with serving(FakeEngine()) as served:
        body = {
            "prompt": PROMPT,
            "max_tokens": 0,
            "echo": True,
            "stream_options": {"continuous_usage_stats": True},
        }
        chunks = await stream(served, body)
    assert {chunk["usage"]["completion_tokens"] for chunk in chunks} == {0}


async def test_log_probabilities_that_name_tokens_by_their_ids() -> None:
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    async with serving(FakeEngine()) as served:
        body = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1}
        [choice], _ = await both(served, body | named)
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 2}
        _, whole = await ask(served, chat | {"top_logprobs": 1} | named, "/v1/chat/completions")
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    for name, top in zip(*map(choice["logprobs"].get, ("tokens", "top_logprobs")), strict=True):
        assert top is None or name in top
    [answer] = whole["choices"]
    content = answer["logprobs"]["content"]
    assert [at["token"] for at in content] == [f"token_id:{token}" for token in answer["token_ids"]]
    assert all(at["top_logprobs"][0]["token"].startswith("token_id:") for at in content)


async def test_chats_token_ids() -> None:
    async with serving(FakeEngine()) as served:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "return_token_ids": True,
        }
        _, whole = await ask(served, body, "/v1/chat/completions")
        chunks = await stream(served, body, "/v1/chat/completions")
    assert whole["prompt_token_ids"] == list(b"<user>x<assistant>")
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        whole["prompt_token_ids"]
    ]
    ids = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids", ())
    ]
    assert (
        ids
        == whole["choices"][0]["token_ids"]
        == list(whole["choices"][0]["message"]["content"].encode())
    )


@pytest.mark.parametrize(
    "prompt", ["x" * (LONG_SCORES + 2), ["x" * (LONG_SCORES + 2), "y" * (LONG_SCORES + 3), "z"]]
)
@pytest.mark.parametrize("silent", [False, True])
async def test_many_log_probabilities_are_written_down_beside_the_event_loop(
    prompt: Any, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7,000 tokens with 20 others each took a second of it, in which no other stream went on."""
    real, long_ones = CompletionDialect._logprobs, list[int]()

    def watched(self: CompletionDialect, index: int, answer: Any, prompt: Any = ()) -> Any:
        if len(prompt) > LONG_SCORES:
            long_ones.append(get_ident())
        return real(self, index, answer, prompt)

    monkeypatch.setattr(CompletionDialect, "_logprobs", watched)
    async with serving(FakeEngine()) as served:
        choices, _ = await both(
            served,
            {"prompt": prompt, "max_tokens": 0 if silent else 2, "echo": True, "logprobs": 1},
        )
    prompts = [prompt] if isinstance(prompt, str) else prompt
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [
        len(one) + (0 if silent else 2) for one in prompts
    ]
    assert len(long_ones) == 2 * sum(len(one) > LONG_SCORES for one in prompts)
    assert get_ident() not in long_ones
