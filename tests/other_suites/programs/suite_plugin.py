"""Plugin of pytest for a suite of another project: leaves out what suites.json names, and writes
what became of each test."""

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import served
import stand_ins

tests = {}


def pytest_load_initial_conftests():
    """Before the suite's conftest.py, which may read the URL as it is imported."""
    stand_ins.install(served.PLAN["stand_ins"])
    if name := served.PLAN["url_variable"]:
        os.environ[name] = served.serve() + "/v1"


def reason_of(name):
    if chosen := served.PLAN["chosen"]:
        is_chosen = any(fnmatchcase(name, pattern) for pattern in chosen)
        return None if is_chosen else "not chosen"
    patterns = served.PLAN["left_out"]
    return next((why for pattern, why in patterns if fnmatchcase(name, pattern)), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    left = []
    for item in items:
        if (why := reason_of(item.nodeid)) is not None:
            tests[item.nodeid] = ("left out", why)
            left.append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item.nodeid not in tests]


def pytest_collectreport(report):
    if report.failed:
        tests[report.nodeid] = ("failed", f"cannot be collected: {report.longreprtext[-600:]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = served.count_uses()
    done = yield
    idle = served.count_uses() == before and not served.PLAN["url_variable"]
    if idle and tests.get(item.nodeid, ("",))[0] == "passed":
        tests[item.nodeid] = ("failed", "passes without having asked a server")
    return done


def pytest_runtest_logreport(report):
    if report.failed:
        tests[report.nodeid] = ("failed", report.longreprtext[-600:])
    elif report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
        tests[report.nodeid] = ("skipped", why)
    elif report.when == "call":
        tests[report.nodeid] = ("passed", "")


def pytest_runtest_logfinish():
    write()


def pytest_sessionfinish():
    write()


def write():
    lines = [
        {"name": name, "outcome": outcome, "reason": reason}
        for name, (outcome, reason) in tests.items()
    ]
    Path(served.PLAN["report"]).write_text(json.dumps(lines), "utf-8")
