"""docs/certificates and the README say what the certificates say: `just certificates` makes
both."""

from __future__ import annotations

from tests import certificates
from trouper_lab.certify.certificate import FORMAT
from trouper_lab.certify.certificate_files import as_html
from trouper_lab.certify.making import SECTIONS


def test_the_page_is_made_from_the_files() -> None:
    assert certificates.PAGE.read_text() == certificates.page()


def test_the_rows_of_the_readme_are_made_from_the_files() -> None:
    assert certificates.README.read_text() == certificates.readme()
    assert len(certificates.readme_rows()) == len(certificates.certificates())


def test_each_certificate_has_its_page_and_says_which_sections_it_has() -> None:
    found = certificates.certificates()
    assert found
    for name, certificate in found.items():
        assert (certificates.FOLDER / f"{name}.html").read_text() == as_html(certificate)
        assert certificate["format"] == FORMAT and not certificate["quick"]
        sections = [section["name"] for section in certificate["sections"]]
        assert sections == [section for section in SECTIONS if section in sections]
        [row] = [row for row in certificates.readme_rows() if f"#{name})" in row]
        complete = {*SECTIONS} - {*sections} <= {"images"}
        assert (", ".join(sections) in row) == (not complete)
