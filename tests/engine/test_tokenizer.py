"""Tokens to bytes, for each kind of tokenizer, made here; chat templates; the ends of a turn."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.encoder_tokenizers import save_unigram, save_wordpiece
from tests.families import save_tokenizer, write_json
from trouper.engine.loading.token_bytes import BYTE_OF, byte_level, sentencepiece
from trouper.engine.loading.tokenizer import HubTokenizer, eos_ids, load
from trouper.protocol.problems import ModelUnusable, RequestFailed

USER = {"role": "user", "content": "hi"}


def saved(backend: Backend, directory: Path, **config: Any) -> HubTokenizer:
    backend.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **config},
    )
    return load(directory)


@pytest.fixture
def byte_bpe(tmp_path: Path) -> HubTokenizer:
    save_tokenizer(tmp_path)
    return load(tmp_path)


@pytest.fixture
def spm(tmp_path: Path) -> HubTokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
    ]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return saved(backend, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def wordpiece(tmp_path: Path) -> HubTokenizer:
    pieces = ["[UNK]", "a", "play", "##ing", "now"]
    backend = Backend(
        models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return saved(backend, tmp_path, unk_token="[UNK]")


def text_of(tokenizer: HubTokenizer, tokens: tuple[int, ...]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, tokens))


@pytest.mark.parametrize("text", ["plain", " ab", "\n\ttab", "é – 日本語 🫖", "\x00\x7f"])
def test_bytes_of_byte_level_tokens(byte_bpe: HubTokenizer, text: str) -> None:
    assert text_of(byte_bpe, byte_bpe.encode(text)) == text.encode()


@pytest.mark.parametrize("text", [" ab", "ab  a", "é🫖"])
def test_bytes_of_sentencepiece_tokens(spm: HubTokenizer, text: str) -> None:
    assert text_of(spm, spm.encode(text)) == text.encode()


def test_bytes_of_wordpiece_tokens(wordpiece: HubTokenizer) -> None:
    assert text_of(wordpiece, wordpiece.encode("playing now")) == b" playing now"


@given(st.binary())
def test_byte_characters_are_a_bijection(data: bytes) -> None:
    character_of = {byte: character for character, byte in BYTE_OF.items()}
    assert len(character_of) == 256
    assert byte_level("".join(character_of[byte] for byte in data)) == data


def test_pieces() -> None:
    assert sentencepiece("▁the") == b" the"
    assert sentencepiece("<0xE2>") == b"\xe2"
    assert byte_level("日本") == "日本".encode()  # an added token, not in the table


def test_special_tokens_are_silent_and_added_text_is_not(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = saved(backend, tmp_path, eos_token="<|end|>")
    (think,) = tokenizer.encode("<think>")
    assert tokenizer.token_bytes(think) == b"<think>"
    assert (tokenizer.token_bytes(511), tokenizer.token_text(511)) == (b"", "<|end|>")


def test_ids_beyond_the_vocabulary_add_nothing(byte_bpe: HubTokenizer) -> None:
    """Models pad their vocabulary to a multiple of something."""
    assert byte_bpe.token_bytes(512) == b""
    assert {byte_bpe.token_bytes(-back) for back in range(1, 600)} == {b""}, (
        "nor are they counted from the end"
    )


def test_half_a_character_is_printable(byte_bpe: HubTokenizer) -> None:
    first = byte_bpe.encode("é")[0]
    assert byte_bpe.token_text(first) == "\\xc3"


def test_a_templates_tokens_come_once(spm: HubTokenizer, tmp_path: Path) -> None:
    """F1: a template that writes <s> itself, and a tokenizer that adds one to plain text."""
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "<s>{{ messages[0]['content'] }}{% if add_generation_prompt %}b{% endif %}"
    tokenizer = saved(backend, tmp_path, bos_token="<s>", eos_token="</s>", chat_template=template)
    assert tokenizer.encode(" a").count(1) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": " a"}]).count(1) == 1
    with_prompt = tokenizer.encode_chat([USER])
    assert tokenizer.encode_chat([USER], add_generation_prompt=False) == with_prompt[:-1]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.strip() }}",
        "{% for %}",
    ],
)
def test_a_template_that_refuses_is_a_bad_request(tmp_path: Path, template: str) -> None:
    save_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = saved(backend, tmp_path, chat_template=template)
    with pytest.raises(RequestFailed) as failed:
        tokenizer.encode_chat([USER])
    assert (failed.value.problem.status, failed.value.problem.param) == (400, "messages")


def test_every_end_of_a_turn(tmp_path: Path) -> None:
    """F16: the tokenizer's own, an int, a list, and one that is nested."""
    save_tokenizer(tmp_path)
    found = load(
        tmp_path,
        {"eos_token_id": 3},
        {"eos_token_id": [4, 5]},
        {"text_config": {"eos_token_id": 6}},
        {},
    )
    assert found.eos_token_ids == {511, 3, 4, 5, 6}
    assert eos_ids({"eos_token_id": 0}) == {0}
    assert load(tmp_path, {"eos_token_id": [4, None]}, {"eos_token_id": "</s>"}).with_grammars(
        512
    ).eos_token_ids == {
        511,
        4,
    }


def test_what_is_nested_too_deeply_for_a_template_is_a_bad_request(tmp_path: Path) -> None:
    """The JSON of a request may be nested more deeply than a template can write it down again."""
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    save_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = saved(backend, tmp_path, chat_template="{{ tools | tojson(indent=4) }}")
    with pytest.raises(RequestFailed) as caught:
        tokenizer.encode_chat([USER], tools=[deep])
    assert caught.value.problem.status == 400


def test_a_chat_template_of_a_processor(tmp_path: Path) -> None:
    """As older checkpoints of models that see have it. A tokenizer's own comes first."""
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own = config.pop("chat_template")
    write_json(tmp_path / "chat_template.json", {"chat_template": "{{ 'of the processor' }}"})
    assert load(tmp_path)._wrapped.apply_chat_template([USER], tokenize=False) != "of the processor"
    write_json(tmp_path / "tokenizer_config.json", config)
    assert load(tmp_path)._wrapped.apply_chat_template([USER], tokenize=False) == "of the processor"
    (tmp_path / "chat_template.jinja").write_text(own)
    assert load(tmp_path)._wrapped.apply_chat_template([USER], tokenize=False) != "of the processor"


def test_chat_template_or_none(byte_bpe: HubTokenizer, tmp_path: Path) -> None:
    assert byte_bpe.has_chat_template
    assert not saved(
        Backend.from_file(str(tmp_path / "tokenizer.json")), tmp_path
    ).has_chat_template


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_no_usable_tokenizer_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelUnusable) as unusable:
        load(tmp_path)
    assert str(tmp_path) in str(unusable.value)
    assert "\n" not in str(unusable.value)


def test_code_of_a_model_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: `trouper doctor` asked on stdin whether it might run the model's tokenizer, and
    ran it after a "y"."""
    ran = tmp_path / "ran"
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    }
    write_json(tmp_path / "tokenizer_config.json", {**config, **own})
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass OwnTokenizer: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert load(tmp_path).encode("a b"), "tokenizer.json alone says what the tokens are"
    assert not ran.exists()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelUnusable, match=r"own\.OwnTokenizer.*not run here"):
        load(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "max_position_embeddings": "many"},
        {
            "model_type": "kimi_k2",
            "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0},
            "max_position_embeddings": 131072,
        },
        {"model_type": "nemotron-nas", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "step3p5", "rope_theta": [5e6, 1e4], "layer_types": ["full_attention"]},
    ],
)
def test_a_tokenizer_needs_no_opinion_of_the_config(
    config: dict[str, object], byte_bpe: HubTokenizer, tmp_path: Path
) -> None:
    """transformers refuses these configs, and with them tokenizer.json."""
    save_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", config)
    assert load(tmp_path).encode("  A sentence.\n") == byte_bpe.encode("  A sentence.\n")


def test_the_last_message_goes_on(byte_bpe: HubTokenizer) -> None:
    """continue_final_message: nothing ends it. Without add_generation_prompt no answer begins."""
    history = [USER, {"role": "assistant", "content": "I say"}]
    end = b"assistant: I say"
    continued = byte_bpe.encode_chat(
        history, add_generation_prompt=False, continue_final_message=True
    )
    assert text_of(byte_bpe, continued).endswith(end)
    assert continued[-1] not in byte_bpe.eos_token_ids
    closed = byte_bpe.encode_chat(history, add_generation_prompt=False)
    assert closed[-1] in byte_bpe.eos_token_ids and text_of(byte_bpe, closed).endswith(end)
    assert text_of(byte_bpe, byte_bpe.encode_chat(history)).endswith(b"assistant: ")


LONG = "abc é \U0001f469 <|im_end|> 123  \n" * 1500


@pytest.mark.parametrize("text", ["", "a", LONG[:40], LONG])
def test_a_text_has_the_tokens_that_its_wrapper_would_give(
    text: str, byte_bpe: HubTokenizer, spm: HubTokenizer
) -> None:
    """It goes to the library without a detour, which gives the interpreter back meanwhile."""
    for tokenizer in (byte_bpe, spm):
        assert tokenizer._fast is not None
        for special in (True, False):
            wanted = tuple(tokenizer._wrapped.encode(text, add_special_tokens=special))
            assert tokenizer.encode(text, special=special) == wanted
            assert len(wanted) >= len(text) // 2


@pytest.mark.parametrize("save", [save_wordpiece, save_unigram])
def test_a_batch_has_the_tokens_of_each_text_and_pair(
    save: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    save(tmp_path, 300)
    for tokenizer in (load(tmp_path), load(tmp_path, lower_case=True)):
        pair, text = ("What barks?", "A DOG"), "the capital of france"
        empty = tokenizer.encode_pair("a", "")
        tokens = [tokenizer.encode_pair(*pair), (tokenizer.encode(text), 0), empty]
        assert tokenizer.encode_batch([pair, text, ("a", "")]) == tokens
        assert len(empty[0]) > len(tokenizer.encode("a"))
        assert (tokens[0][1] > 0) == (save is save_wordpiece), "BERT tells both texts apart"


@pytest.mark.parametrize(("save", "end"), [(save_wordpiece, "[SEP]"), (save_unigram, "</s>")])
def test_texts_in_lower_case_keep_special_tokens(
    save: Callable[[Path, int], Path], end: str, tmp_path: Path
) -> None:
    """As sentence-transformers reads `do_lower_case`."""
    save(tmp_path, 300)
    plain, lower = load(tmp_path), load(tmp_path, lower_case=True)
    assert lower.encode("A DOG") == plain.encode("a dog")
    assert lower.encode_pair("A DOG", "BARKS") == plain.encode_pair("a dog", "barks")
    assert lower.encode(f"A Dog{end}") == plain.encode(f"a dog{end}")


TEXT = "A  Dog bárks, [SEP]"


def test_lower_case_in_the_config_of_a_bert_counts(tmp_path: Path) -> None:
    """As in transformers, whatever tokenizer.json says of its normalizer."""
    save_wordpiece(tmp_path, 300)
    expected = load(tmp_path).encode(TEXT)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "do_lower_case": True}))
    assert load(tmp_path).encode(TEXT) == expected
    file.write_text(json.dumps({**config, "do_lower_case": False}))
    assert load(tmp_path).encode(TEXT) != expected


def test_the_blank_that_the_config_of_a_roberta_puts_first_counts(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<s>", "</s>", *letters])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    for blank in (False, True):
        write_json(tmp_path / "tokenizer_config.json", config | {"add_prefix_space": blank})
        tokens = load(tmp_path).encode("a", special=False)
        assert tokens == tuple(vocabulary[token] for token in ("Ġa" if blank else "a"))


def test_a_model_that_transformers_does_not_know_is_none_of_its_concern(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_wordpiece(tmp_path, 300)
    write_json(tmp_path / "config.json", {"model_type": "new"})
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        load(tmp_path)
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.messages


def test_a_vocabulary_is_enough_for_a_bert(tmp_path: Path) -> None:
    save_wordpiece(tmp_path, 300)
    opened = load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelUnusable, match=r"has no tokenizer\.json"):
        load(tmp_path)
    in_order = sorted(opened.vocabulary, key=lambda token: opened.vocabulary[token])
    (tmp_path / "vocab.txt").write_text("\n".join(in_order))
    assert load(tmp_path).encode(TEXT) == opened.encode(TEXT)


def test_a_tokenizer_that_cuts_or_pads_is_left_to_its_wrapper(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(7)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    assert len(tokenizer.encode(LONG)) > 20_000


def test_what_a_template_renders_has_the_tokens_of_the_chat(byte_bpe: HubTokenizer) -> None:
    rendered = byte_bpe.render_chat([USER], {})
    assert rendered is not None
    assert byte_bpe.encode(rendered, special=False) == byte_bpe.encode_chat([USER])
    options = {"add_generation_prompt": False}
    rendered = byte_bpe.render_chat([USER], options)
    assert rendered is not None
    assert byte_bpe.encode(rendered, special=False) == byte_bpe.encode_chat([USER], **options)


def test_a_tokenizer_with_a_template_of_its_own_renders_and_tokenizes_in_one(
    byte_bpe: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(byte_bpe._wrapped._tokenizer), "apply_chat_template", lambda *_, **__: [1, 2]
    )
    assert byte_bpe.render_chat([USER], {}) is None
    assert byte_bpe.encode_chat([USER]) == (1, 2)


def test_the_longest_token(byte_bpe: HubTokenizer) -> None:
    assert (
        byte_bpe.longest_token == max(len(byte_bpe.token_bytes(token)) for token in range(512)) > 1
    )


def test_a_tokenizer_that_panics_refuses_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of Rust is no `Exception`: it would end the server, and not the request."""
    save_tokenizer(tmp_path)
    split = {
        "type": "Split",
        "pattern": {"Regex": "(b+)+!"},
        "behavior": "Isolated",
        "invert": False,
    }
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    write_json(tmp_path / "tokenizer.json", content | {"pre_tokenizer": split})
    tokenizer = load(tmp_path)
    with pytest.raises(RequestFailed, match="tokenizer fails on this text"):
        tokenizer.encode("b" * 64)
