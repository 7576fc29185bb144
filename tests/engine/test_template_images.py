"""Which messages can hold images, by the chat template, and that only the template writes their
markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.fake_images import FakeLayout, png_file
from tests.fakes import card
from tests.families import save_tokenizer, write_json
from trouper.actors.runtime.image_prompts import insert_images
from trouper.engine.loading.message_adaptation import MOVED_IMAGE
from trouper.engine.loading.tokenizer import HubTokenizer, load
from trouper.protocol.media import ImageSource
from trouper.protocol.problems import RequestFailed
from trouper.protocol.requests import ChatPrompt
from trouper.protocol.settings import Settings

Json = dict[str, Any]
MARKER = "<|image_pad|>"
IMAGE: Json = {"type": "image"}
BOTH, USER, NONE = frozenset({"user", "tool"}), frozenset({"user"}), frozenset[str]()
CONTENT = """{%- macro written(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content or () -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}"""
CALLS = """{%- for call in turn.tool_calls or () -%}
{{- ' <tool_call>' + call.function | tojson + '</tool_call>' -}}{%- endfor -%}"""
START = """{%- for tool in tools or () -%}{{- tool | tojson -}}{%- endfor -%}
{%- for turn in messages -%}"""
END = "{{- '<|im_end|>' -}}{%- endfor -%}"
EVERYWHERE = CONTENT + START + "{{- '<' + turn.role + '>' + written(turn.content) -}}" + CALLS + END
"""As Qwen3-VL's."""
USERS_ONLY = (
    CONTENT
    + START
    + "{{- '<' + turn.role + '>' -}}{%- if turn.role == 'user' -%}{{- written(turn.content) -}}"
    + "{%- else -%}{{- turn.content -}}{%- endif -%}"
    + CALLS
    + END
)
"""As Mistral's: a result is text."""
ALTERNATING = (
    "{%- for turn in messages -%}{%- if not loop.first and turn.role == messages[loop.index0 - 1]"
    ".role -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}"
    "{%- if turn.role not in ('user', 'assistant') -%}{{- raise_exception('role') -}}{%- endif -%}"
    "{%- endfor -%}" + EVERYWHERE.replace(CALLS, "")
)
"""As Gemma's: results become the user's, and join the next question."""
TEXT_ONLY = START + "{{- '<' + turn.role + '>' + turn.content -}}" + CALLS + END
AS_PYTHON = START + "{{- '<' + turn.role + '>' ~ turn.content -}}" + CALLS + END


def tokenizer_of(directory: Path, template: str, config: Json | None = None) -> HubTokenizer:
    save_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    marks = (MARKER, "<|vision_start|>", "<|vision_end|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    backend.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    write_json(directory / "tokenizer_config.json", named)
    return load(directory, {"vision_config": {}} if config is None else config)


@pytest.mark.parametrize(
    ("template", "roles", "moved"),
    [
        (EVERYWHERE, BOTH, False),
        (USERS_ONLY, BOTH, True),
        (ALTERNATING, BOTH, False),
        (TEXT_ONLY, NONE, False),
        (AS_PYTHON, NONE, False),
    ],
)
def test_roles_whose_messages_hold_images(
    tmp_path: Path, template: str, roles: frozenset[str], moved: bool
) -> None:
    report = tokenizer_of(tmp_path, template).template
    assert report.roles_with(MARKER) == roles
    assert ("tool_images" in dict(report.lines)) == moved
    assert report.roles_with("<image>") == NONE, "another model's marker"


def test_a_text_model_is_not_probed(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, USERS_ONLY, {}).template.image_roles == NONE


def text(content: str) -> Json:
    return {"type": "text", "text": content}


def call(name: str) -> Json:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}


def result(name: str, *content: Json) -> Json:
    return {"role": "tool", "tool_call_id": name, "name": name, "content": [*content]}


def test_images_move_behind_all_results_of_a_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, USERS_ONLY)
    first: list[Json] = [
        {"role": "user", "content": "see"},
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]},
        result("a", text("one"), IMAGE),
        result("b", IMAGE),
    ]
    rendered = tokenizer.render_chat(first, {})
    assert rendered is not None
    pads = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    assert rendered.endswith(
        f"<tool>one\n{MOVED_IMAGE}<|im_end|><tool>{MOVED_IMAGE}<|im_end|><user>{pads}<|im_end|>"
    )
    more: list[Json] = [{"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]
    again = tokenizer.render_chat([*first, *more], {})
    assert again is not None and again.startswith(rendered), "the cache holds"


def test_joined_messages_keep_their_images(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ALTERNATING)
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    turns: list[Json] = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [text("one"), IMAGE]},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "", "tool_calls": [call("a")]},
        result("a", IMAGE),
        {"role": "user", "content": [IMAGE, text("three")]},
    ]
    rendered = tokenizer.render_chat(turns, {})
    assert rendered is not None
    assert f"<user>be short\n\none{pad}\n\ntwo<|im_end|>" in rendered
    assert f"<tool_response>\n{pad}\n</tool_response>\n\n{pad}three<|im_end|>" in rendered


def inserted(tokenizer: HubTokenizer, messages: list[Json], images: int) -> Any:
    sources = tuple(ImageSource(png_file(20, 10), f"image {n}") for n in range(images))
    prompt = ChatPrompt(tuple(messages), images=sources)
    seeing = attrs.evolve(card(), images=FakeLayout(marker=MARKER))
    tokens = tokenizer.encode_chat(messages)
    return tokens, insert_images(tokens, prompt, seeing, tokenizer, Settings())


def test_only_the_templates_markers_are_images(tmp_path: Path) -> None:
    """A client's text that looks like a marker is text, before and behind images."""
    tokenizer = tokenizer_of(tmp_path, EVERYWHERE)
    words = [text(f"a {MARKER} b"), IMAGE, text(f"{MARKER}{MARKER}"), IMAGE]
    tokens, (expanded, images) = inserted(tokenizer, [{"role": "user", "content": words}], 2)
    pad = tokenizer.vocabulary[MARKER]
    assert tokens.count(pad) == 2 and pad not in expanded
    places = [index for index, token in enumerate(tokens) if token == pad]
    length = len(images[0].span.tokens)
    assert [image.span.start for image in images] == [places[0], places[1] + length - 1]
    assert len(expanded) == len(tokens) + 2 * (length - 1)
    assert images[0].span.digest == images[1].span.digest, "the same file"
    for image in images:
        assert expanded[image.span.start : image.span.end] == image.span.tokens


def test_a_template_that_drops_an_image_is_an_error(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, EVERYWHERE)
    with pytest.raises(RequestFailed) as caught:
        inserted(tokenizer, [{"role": "user", "content": [IMAGE]}], 2)
    problem = caught.value.problem
    assert (problem.status, problem.code) == (400, "image_template_mismatch")
