"""Lines of files as editors and shells write them: marks, ends of lines, blanks. Pure."""

from __future__ import annotations

import json
from codecs import BOM_UTF8, BOM_UTF16_LE
from pathlib import Path

import pytest

from trouper.web.batches import input_lines
from trouper.web.batches.input_lines import InputLines, LinesInvalid, validated

ENDPOINT = "/v1/chat/completions"


def line(custom_id: str) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"n": 1}}
    ).encode()


def read(path: Path, data: bytes) -> InputLines:
    path.write_bytes(data)
    return validated(path, ENDPOINT, 1000)


def ids(lines: InputLines) -> list[str]:
    return [lines.read(number).custom_id for number in range(len(lines))]


def codes(path: Path, data: bytes) -> list[tuple[str, int | None]]:
    with pytest.raises(LinesInvalid) as invalid:
        read(path, data)
    return [(error.code, error.line) for error in invalid.value.errors]


@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \t\n\r\n  \n"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\r\n\n", b"  "])
def test_marks_ends_and_blanks(tmp_path: Path, mark: bytes, end: bytes, last: bytes) -> None:
    lines = read(tmp_path / "lines", mark + line("a") + end + line("b") + last)
    assert ids(lines) == ["a", "b"]
    assert bytes(lines.read(0).body) == b'{"n": 1}'


def test_a_mark_is_no_request_and_none_within_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert (
        codes(path, BOM_UTF8)
        == codes(path, b"")
        == codes(path, BOM_UTF8 + b"\r\n")
        == [("empty_file", None)]
    )
    assert codes(path, line("a") + b"\n" + BOM_UTF8 + line("b")) == [("invalid_json_line", 2)]
    assert codes(path, BOM_UTF16_LE + line("a").decode().encode("utf-16-le"))[0] == (
        "invalid_json_line",
        1,
    )
    assert codes(path, line("a") + b"\0") == [("invalid_json_line", 1)]


def test_a_file_of_blank_lines_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_lines, "MAX_FILE_LINES", 5)
    path = tmp_path / "lines"
    assert ids(read(path, b"\n" * 4 + line("a"))) == ["a"]
    assert codes(path, b"\n" * 5 + line("a")) == [("too_many_lines", None)]
    assert codes(path, b"\n" * 10**6) == [("too_many_lines", None), ("empty_file", None)]
    monkeypatch.setattr(input_lines, "MAX_LINES", 2)
    assert codes(path, (line("a") + b"\n" + line("b") + b"\n" + line("c"))) == [
        ("too_many_tasks", None)
    ]
