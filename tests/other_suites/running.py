"""Runs a suite of another project against `trouper serve`, and collects its tests' outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import cattrs

from tests.other_suites.shallow_model import write_shallow_model
from tests.other_suites.sources import lay_out
from tests.other_suites.suites import Suite

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 3600
OF_EACH = ("pytest>=8,<9", "pytest-timeout>=2.4")


@attrs.frozen
class Result:
    """`outcome`: passed, failed, left out or skipped (by the suite itself)."""

    name: str
    outcome: str
    reason: str = ""


@attrs.frozen
class Outcome:
    title: str
    version: str
    tests: Sequence[Result]
    files: Sequence[str]
    """Those that were collected."""
    files_left_out: Counter[str]
    """Numbers of files by reason."""
    unlisted: Sequence[str]
    """Files that are among neither."""
    idle: Sequence[str]
    """Patterns of suites.json that no test or file has."""
    problem: str = ""

    def tests_that(self, outcome: str) -> Sequence[Result]:
        return [test for test in self.tests if test.outcome == outcome]

    @property
    def is_right(self) -> bool:
        wrong = (self.tests_that("failed"), self.unlisted, self.idle, self.problem)
        return bool(self.tests) and not any(wrong)


def run(name: str, suite: Suite, chosen: Sequence[str] = ()) -> Outcome:
    """`chosen`: patterns of the tests that run in place of all that are not left out, whether they
    are left out or not."""
    with tempfile.TemporaryDirectory(prefix="suite-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        version = lay_out(name, suite, home)
        there = [path.relative_to(home).as_posix() for path in sorted(home.rglob("*.py"))]
        there = [
            path for path in there if Path(path).name.startswith("test_") or path in suite.tests
        ]
        files, left_out, unlisted, idle = sort_files(suite, there)
        tests, problem = _run_pytest(home, suite, files, chosen)
    patterns = [pattern for some in suite.left_out.values() for pattern in some]
    if not chosen:
        names = [test.name for test in tests]
        idle += [
            pattern
            for pattern in patterns
            if not any(fnmatchcase(test, escaped(pattern)) for test in names)
        ]
    return Outcome(suite.title, version, tests, files, left_out, unlisted, idle, problem)


def escaped(pattern: str) -> str:
    """The pattern of a test with its brackets as they are: pytest writes parameters within some."""
    return pattern.replace("[", "[[]")


def sort_files(
    suite: Suite, there: Sequence[str]
) -> tuple[list[str], Counter[str], list[str], list[str]]:
    """Files that are collected, the number of those left out by reason, those that no pattern
    names, and patterns that name none."""
    collected, unlisted = [], []
    left_out: Counter[str] = Counter()
    used = set()
    reasons = [(pattern, why) for why, some in suite.files_left_out.items() for pattern in some]
    for path in there:
        test = next((one for one in suite.tests if fnmatchcase(path, one)), None)
        reason = next((one for one in reasons if fnmatchcase(path, one[0])), None)
        if reason is not None:
            left_out[reason[1]] += 1
            used.add(reason[0])
        elif test is not None:
            collected.append(path)
            used.add(test)
        else:
            unlisted.append(path)
    patterns = [*suite.tests, *(pattern for pattern, _ in reasons)]
    return collected, left_out, unlisted, [one for one in patterns if one not in used]


def _run_pytest(
    home: Path, suite: Suite, files: Sequence[str], chosen: Sequence[str]
) -> tuple[list[Result], str]:
    model = home / "shallow"
    write_shallow_model(model)
    plan = {
        "stand_ins": suite.stand_ins,
        "left_out": [
            [escaped(pattern), why] for why, some in suite.left_out.items() for pattern in some
        ],
        "chosen": [escaped(pattern) for pattern in chosen],
        "server": ["--model", str(model), "--batch-dir", str(home / "batches"), *suite.server],
        "url_variable": suite.url_variable,
        "program": [str(Path(sys.executable).with_name("trouper")), "serve"],
        "model": str(model),
        "report": str(home / "report.json"),
    }
    (home / "plan.json").write_text(json.dumps(plan), "utf-8")
    (home / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n", "utf-8")
    packages = [word for package in (*OF_EACH, *suite.packages) for word in ("--with", package)]
    line = ["uv", "run", "--quiet", "--no-project", "--python", sys.executable, *packages]
    plugins = ["suite_plugin", *(["own_server"] if (home / "own_server.py").exists() else [])]
    line += ["python", "-m", "pytest", "--quiet", "--rootdir", str(home)]
    line += [word for plugin in plugins for word in ("-p", plugin)]
    line += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    line += ["--timeout", "120", "--tb", "short", *files]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_API_KEY") and not name.startswith("TROUPER_")
    }
    environment |= {
        "PYTHONPATH": f"{PROGRAMS}:{home}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SUITE_PLAN": str(home / "plan.json"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ended = subprocess.run(
        line,
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    report = home / "report.json"
    if not report.exists():
        return [], (ended.stdout + ended.stderr)[-3000:]
    tests = cattrs.structure(json.loads(report.read_text("utf-8")), list[Result])
    return tests, "" if tests else ended.stdout[-3000:]
