"""Fill in the middle: `suffix` of completions, and llama.cpp's /infill."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import attrs
import openai
import pytest
import trio

from tests.fakes import MARKS, ByteTokenizer, FakeEngine, Infilling
from tests.web.serving import Served, ask, exchange, post, serving
from trouper.actors.runtime.prompt_tokenizing import FILE, REPOSITORY, SNIPPET, infill_of
from trouper.engine.loading.infill_detection import FAMILIES, infill_tokens_of
from trouper.protocol.model import InfillTokens
from trouper.protocol.requests import InfillPrompt

GAP = {"input_prefix": "ab", "input_suffix": "yz"}


class SentencePiece(ByteTokenizer):
    """Puts a token before each text, and a space before its first word."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        spaced = " " * (text[:1].isalnum()) + text
        return (*((254,) if special else ()), *spaced.encode())

    infill: InfillTokens | None = MARKS


def marked(**more: Any) -> ByteTokenizer:
    tokenizer = Infilling()
    tokenizer.infill = attrs.evolve(MARKS, **more)
    return tokenizer


class TestPrompt:
    def test_prefix_suffix_middle(self) -> None:
        assert infill_of(InfillPrompt("ab", "yz"), Infilling()) == (1, *b"ab", 2, *b"yz", 3)
        assert infill_of(InfillPrompt((97, 98), ""), Infilling()) == (1, *b"ab", 2, 3)

    def test_codestral_has_the_suffix_first(self) -> None:
        assert infill_of(InfillPrompt("ab", "yz"), marked(middle=None)) == (2, *b"yz", 1, *b"ab")

    def test_other_files_as_llama_cpp_has_them(self) -> None:
        prompt = InfillPrompt("a", "z", (("x.py", "x"), ("y.py", "y")))
        gap = (1, *b"a", 2, *b"z", 3)
        files = (5, *REPOSITORY.encode(), 4, *b"x.py\nx", 4, *b"y.py\ny", 4, *FILE.encode())
        assert infill_of(prompt, marked(file=4, repository=5)) == (*files, *gap)
        snippets = f"{SNIPPET}x{SNIPPET}y".encode()
        assert infill_of(prompt, Infilling()) == (*snippets, *gap)

    def test_a_suffix_begins_within_the_text(self) -> None:
        assert infill_of(InfillPrompt("ab", "yz"), SentencePiece()) == (
            254,
            1,
            *b" ab",
            2,
            *b"yz",
            3,
        )

    @pytest.mark.parametrize("family", FAMILIES)
    def test_each_family_is_found(self, family: tuple[str, ...]) -> None:
        vocabulary = {
            name: at
            for at, name in enumerate(filter(None, (*family, "<|file_sep|>", "<|endoftext|>", "a")))
        }
        found = infill_tokens_of(vocabulary)
        assert found is not None
        assert (found.prefix, found.suffix) == (0, 1) and found.middle == (2 if family[2] else None)
        assert found.file == vocabulary["<|file_sep|>"] and found.repository is None
        assert found.ends == tuple(at for name, at in vocabulary.items() if name != "a")
        del vocabulary[family[0]]
        assert infill_tokens_of(vocabulary) is None


def complete(url: str, **body: Any) -> Any:
    strict = partial(openai.OpenAI, _strict_response_validation=True)
    with strict(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        return client.completions.create(model="fake", **body)


async def tokens_and_text(served: Served, **body: Any) -> tuple[list[int], str]:
    status, said = await ask(
        served, {"temperature": 0, "max_tokens": 5, "return_token_ids": True, **body}
    )
    assert status == 200, said
    return said["choices"][0]["prompt_token_ids"], said["choices"][0]["text"]


class TestCompletions:
    async def test_the_official_client(self) -> None:
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            ask_for = partial(complete, served.base_url, prompt="ab", max_tokens=5, temperature=0)
            filled = await trio.to_thread.run_sync(partial(ask_for, suffix="yz"))
            plain = await trio.to_thread.run_sync(ask_for)
        assert filled.usage.prompt_tokens == 7 and plain.usage.prompt_tokens == 2
        assert filled.choices[0].text != plain.choices[0].text

    async def test_the_prompt_is_that_of_the_model(self) -> None:
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            tokens, text = await tokens_and_text(served, prompt="ab", suffix="yz")
            assert tokens == [1, *b"ab", 2, *b"yz", 3]
            assert await tokens_and_text(served, prompt=[97, 98], suffix="yz") == (tokens, text)
            assert await tokens_and_text(served, prompt=tokens) == (tokens, text)
            assert (await tokens_and_text(served, prompt="ab", suffix="yz", echo=True))[
                1
            ] == "ab" + text
            assert (await tokens_and_text(served, prompt="ab", suffix=""))[0] == [*b"ab"]

    async def test_a_model_without_the_tokens_says_so(self) -> None:
        async with serving() as served:
            for body, path, param in (
                ({"prompt": "ab", "suffix": "yz"}, "/v1/completions", "suffix"),
                (GAP, "/infill", "input_suffix"),
            ):
                status, said = await ask(served, body, path)
                assert (status, said["error"]["code"], said["error"]["param"]) == (
                    400,
                    "infill_not_supported",
                    param,
                )


class TestInfill:
    async def test_as_llama_cpp_answers(self) -> None:
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            _, text = await tokens_and_text(served, prompt="abcd", suffix="yz")
            status, said = await ask(
                served, {**GAP, "prompt": "cd", "temperature": 0, "n_predict": 5}, "/infill"
            )
        assert status == 200
        assert said == {
            "index": 0,
            "content": text,
            "stop": True,
            "model": "fake",
            "tokens_predicted": 5,
            "tokens_evaluated": 9,
            "tokens_cached": said["tokens_cached"],
            "truncated": False,
            "stop_type": "limit",
            "stopping_word": "",
        }

    async def test_streamed(self) -> None:
        body = {**GAP, "temperature": 0, "n_predict": 5}
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            _, whole = await ask(served, body, "/infill")
            text = whole["content"]
            held = {"stop": text[1:2] + "~"}  # Text waits for what follows it.
            _, _, data = await exchange(served, post("/infill", {**body, **held, "stream": True}))
        events = [
            json.loads(line.removeprefix(b"data: "))
            for line in data.splitlines()
            if line.startswith(b"data: ")
        ]
        assert "".join(event["content"] for event in events) == text
        assert sum(len(event["tokens"]) for event in events[:-1]) == events[-1]["tokens_predicted"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1] == whole | {"content": "", "tokens_cached": events[-1]["tokens_cached"]}

    async def test_a_context_is_computed_before_it_is_asked_for(self) -> None:
        """Editors send `n_predict` 0 with the files that they have open."""
        body = {**GAP, "n_predict": 0, "samplers": []}
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            status, said = await ask(served, body, "/infill")
            assert (status, said["content"], said["tokens_predicted"], said["stop_type"]) == (
                200,
                "",
                0,
                "limit",
            )
            _, _, data = await exchange(served, post("/infill", {**body, "stream": True}))
        [event] = [
            json.loads(line.removeprefix(b"data: "))
            for line in data.splitlines()
            if line.startswith(b"data: ")
        ]
        assert event["stop"] and (event["content"], event["tokens_predicted"]) == ("", 0)

    async def test_what_ends_it(self) -> None:
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            _, whole = await ask(served, {**GAP, "temperature": 0, "n_predict": 5}, "/infill")
            stop = whole["content"][2]
            _, said = await ask(
                served, {**GAP, "temperature": 0, "n_predict": 5, "stop": [stop]}, "/infill"
            )
        assert (said["stop_type"], said["stopping_word"]) == ("word", stop)

    async def test_a_token_of_the_family_ends_it(self) -> None:
        """Which a model writes when the gap is filled, as its next file, or as padding."""
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            _, whole = await ask(served, {**GAP, "temperature": 0, "n_predict": 5}, "/infill")
        ends = (*MARKS.ends, ord(whole["content"][3]))
        async with serving(FakeEngine(tokenizer=marked(ends=ends))) as served:
            _, said = await ask(served, {**GAP, "temperature": 0, "n_predict": 5}, "/infill")
            assert (said["content"], said["stop_type"]) == (whole["content"][:3], "eos")

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"input_prefix": "a"}, "input_suffix"),
            ({**GAP, "input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
            ({**GAP, "grammar": "root ::= a"}, "grammar"),
            ({**GAP, "n_probs": 3}, "n_probs"),
        ],
    )
    async def test_what_cannot_be(self, body: dict[str, Any], param: str) -> None:
        async with serving(FakeEngine(tokenizer=Infilling())) as served:
            status, said = await ask(served, body, "/infill")
        assert (status, said["error"]["param"]) == (400, param)
