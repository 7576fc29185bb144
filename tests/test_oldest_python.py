"""The package and its tests run on 3.11.0: what came later is not used."""

from __future__ import annotations

import pytest

from tests.oldest_python import is_there, late_keywords, sources, standard_names


def test_no_keyword_is_later_than_3_11_0() -> None:
    assert [(path.name, *late) for path, text in sources() for late in late_keywords(text)] == []


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("tar.extractall(place, filter='data')", [("extractall", "filter")]),
        ("rmtree(place, onexc=None)", [("rmtree", "onexc")]),
        ("tar.extractall(place)", []),
        ("glob(filter=1)", []),
    ],
)
def test_the_rule_of_keywords_can_be_broken(text: str, late: list[tuple[str, str]]) -> None:
    assert list(late_keywords(text)) == late


def test_names_of_the_standard_library_are_found_in_functions_too() -> None:
    text = (
        "import os.path as p, attrs\nfrom tarfile import data_filter\ndef f():\n import sys\n "
        "sys.late; p.isdir; attrs.x"
    )
    found = list(standard_names(text))
    assert found == [("tarfile", "data_filter"), ("sys", "late"), ("os.path", "isdir")]
    assert [is_there(*name) for name in found[1:]] == [False, True]
    assert is_there("concurrent", "futures")
