"""`just certificates`: docs/certificates/index.md and rows of the README's table, made from the
certificates themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trouper_lab.certify.certificate import line_of, promises_of, unfinished_of
from trouper_lab.certify.certificate_files import as_html
from trouper_lab.certify.making import SECTIONS

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "certificates"
PAGE, README = FOLDER / "index.md", ROOT / "README.md"
HEAD = "| tested on | what |\n|---|---|\n"
LINK = "(docs/certificates/"
MARKS = {True: "held", False: "**broken**", None: "measured"}
BEGINNING = """# Certificates

Findings of [`trouper certify`](../self-check.md#the-certificate) on these devices. This page, its
HTML files and rows of the README are made from the JSON files by
`just certificates`; a certificate of another device is welcome as an issue.

"""
Json = dict[str, Any]


def certificates() -> dict[str, Json]:
    """By the name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def page() -> str:
    return BEGINNING + "\n".join(
        _section(name, certificate) for name, certificate in certificates().items()
    )


def readme_rows() -> list[str]:
    return [_row(name, certificate) for name, certificate in certificates().items()]


def _row(name: str, certificate: Json) -> str:
    device, model = certificate["device"], certificate["model"]
    checked = [promise for _, promise in promises_of(certificate) if promise["held"] is not None]
    held = sum(promise["held"] for promise in checked)
    failed = [name for found in unfinished_of(certificate).values() for name in found]
    names = [section["name"] for section in certificate["sections"]]
    # Models that read text alone have no images.
    only = "" if {*SECTIONS} - {*names} <= {"images"} else f" ({', '.join(names)} only)"
    also = f"{only}; not run to the end: {', '.join(failed)}" if failed else only
    return f"| {device['name']}, {model['name']} | [{held} of {len(checked)} promises held{also}]({LINK[1:]}index.md#{name}) |"


def _section(name: str, certificate: Json) -> str:
    system, device = certificate["system"], certificate["device"]
    versions = ", ".join(
        f"{package} {number}" for package, number in certificate["versions"].items()
    )
    about = (
        f"{line_of(certificate)[0].upper()}{line_of(certificate)[1:]}.\n\n"
        f"Made {certificate['made'][:10]} in {certificate['seconds']:.0f} s by `{certificate['command']}`; {system['platform']}, {system['cpus']} CPUs, "
        f"{device['memory_bytes'] / 1e9:.0f} GB, {device['float32_gflops']} float32 GFLOP/s; {versions}. Processes that wanted a CPU: "
        f"{system['load_before']} before, {system['load_after']} after. [All of it]({name}.html), [as JSON]({name}.json)."
    )
    return "\n".join(
        [f"## {name}", "", about, "", *_promises(certificate), *_figures(certificate), ""]
    )


def _promises(certificate: Json) -> Iterator[str]:
    yield from ("| section | promise | | measured |", "|---|---|---|---|")
    for section, promise in promises_of(certificate):
        yield f"| {section} | {promise['text']} | {MARKS[promise['held']]} | {promise['measured'].replace('|', '/')} |"
    for section in certificate["sections"]:
        if section["problem"]:
            yield f"| {section['name']} | | {section['status']} | {section['problem'].replace('|', '/')} |"


def _figures(certificate: Json) -> Iterator[str]:
    for section in certificate["sections"]:
        if section["name"] == "throughput" and section["tables"]:
            [table] = section["tables"]
            yield from (
                "",
                "| " + " | ".join(table["columns"]) + " |",
                "|---" * len(table["columns"]) + "|",
            )
            yield from ("| " + " | ".join(row) + " |" for row in table["rows"])


def readme() -> str:
    """The README with these rows and no other rows of certificates."""
    others = "".join(
        line for line in README.read_text().splitlines(keepends=True) if LINK not in line
    )
    return others.replace(HEAD, HEAD + "".join(row + "\n" for row in readme_rows()))


def main() -> None:
    for name, certificate in certificates().items():
        (FOLDER / f"{name}.html").write_text(as_html(certificate))
    PAGE.write_text(page())
    README.write_text(readme())


if __name__ == "__main__":
    main()
