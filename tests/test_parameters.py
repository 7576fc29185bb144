"""docs/parameters.md says what happens to each parameter."""

from __future__ import annotations

from tests.parameters import PAGE, TABLES, remarks_of, rendered


def test_the_tables_are_those_of_the_request_classes() -> None:
    """Each parameter that the official client knows, each that is read or refused, and no other."""
    page = PAGE.read_text()
    assert page == rendered(page), (
        "run `python -m tests.parameters` and say what the new parameters do"
    )


def test_what_is_refused_has_a_remedy() -> None:
    remarks = remarks_of(PAGE.read_text())
    for table in TABLES:
        refused = [
            name for name, verdict in table.verdicts.items() if verdict.startswith("refused")
        ]
        assert refused or not table.request.unsupported, "and there is something to say of"
        assert [name for name in refused if not remarks[table.path][name]] == []
