"""What a public forge runs and shows: workflows, image, formula, templates. Their own linters run
by `just lint-packaging`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.one_answer import UNREACHABLE_PROXY, one_answer
from tests.packaging.installed import REPOSITORY
from trouper.cli import main

FORGE = REPOSITORY / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
TEMPLATES = sorted(
    path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"
)
JUSTFILE = (REPOSITORY / "justfile").read_text()
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


def parsed(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text()))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_no_more(path: Path) -> None:
    assert parsed(path)["permissions"] == {"contents": "read"}
    more = {
        name: job["permissions"]
        for name, job in parsed(path)["jobs"].items()
        if "permissions" in job
    }
    assert more in ({}, {"publish": {"id-token": "write"}})
    assert "secrets." not in path.read_text(), "publishing is trusted: there is no token"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_job_ends_and_each_recipe_exists(path: Path) -> None:
    assert all("timeout-minutes" in job for job in parsed(path)["jobs"].values())
    recipes = {
        name
        for step in steps(path)
        for name in re.findall(r"just ([a-z_][\w-]*)", step.get("run", ""))
    }
    assert recipes and all(re.search(rf"^{name}\b.*:", JUSTFILE, re.MULTILINE) for name in recipes)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_of_strangers_is_put_into_a_script(path: Path) -> None:
    """Titles and branches may hold shell: expressions reach scripts as variables only."""
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []


def test_linux_is_tried_on_every_python_that_the_package_names() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert (
        parsed(FORGE / "workflows" / "test.yml")["jobs"]["linux"]["strategy"]["matrix"]["python"]
        == named
    )


def test_a_mac_must_compute_on_metal_and_certifies_it() -> None:
    job = parsed(FORGE / "workflows" / "test.yml")["jobs"]["macos"]
    text = " ".join(step.get("run", "") for step in job["steps"])
    assert job["runs-on"].startswith("macos-")
    assert (
        "assert mx.metal.is_available()" in text
        and "just test" in text
        and "trouper certify" in text
    )


def test_a_release_is_tried_before_it_is_published() -> None:
    jobs = parsed(FORGE / "workflows" / "release.yml")["jobs"]
    assert jobs["try"]["needs"] == "build" and jobs["publish"]["needs"] == "try"
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert jobs["try"]["strategy"]["matrix"]["file"] == ["*.whl", "*.tar.gz"]
    text = " ".join(step.get("run", "") for step in jobs["try"]["steps"])
    assert all(f"trouper {command}" in text for command in ("doctor", "serve", "chat", "certify"))


def test_flags_of_the_workflows_exist() -> None:
    text = " ".join(step.get("run", "") for path in WORKFLOWS for step in steps(path))
    for command, words in re.findall(r"trouper (\w+)([^\n|]*)", text):
        described = main.get_command(click.Context(main), command)
        assert described is not None
        known = {option for parameter in described.params for option in parameter.opts}
        assert {*re.findall(r"--[\w-]+", words)} <= known


def test_the_image_has_no_root_and_tells_its_health() -> None:
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.search(r"^USER [1-9]\d+$", last, re.MULTILINE) and "root" not in last
    assert "/readyz" in last.split("HEALTHCHECK")[1]
    assert re.search(r"uv==\d", DOCKERFILE) and "--frozen" in DOCKERFILE
    assert 'ENTRYPOINT ["trouper"]' in last


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_of_a_container_is_its_own_behind_a_proxy_too(status: int) -> None:
    """Docker gives containers the proxy of its own configuration, and urllib asks a proxy about
    127.0.0.1, too."""
    command = json.loads(DOCKERFILE.split("HEALTHCHECK")[1].split("CMD ")[1].splitlines()[0])
    with one_answer(status) as asked:
        environment = {"TROUPER_PORT": str(asked.port), **UNREACHABLE_PROXY}
        run = subprocess.run(
            [sys.executable, *command[1:]], env=environment, capture_output=True, check=False
        )
        assert (asked.paths, run.returncode == 0) == (["/readyz"], status == 200), run.stderr


def test_the_image_is_built_from_what_is_there() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    named = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert named and all((REPOSITORY / name).exists() for name in named)
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert {
        build["project"]["readme"],
        *build["project"]["license-files"],
        *build["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    } <= {*named}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_asks_for_a_certificate(path: Path) -> None:
    template = parsed(path)
    assert {"name", "description", "body"} <= template.keys()
    [certificate] = [part for part in template["body"] if part["id"] == "certificate"]
    assert certificate["validations"]["required"]
    assert "trouper certify" in certificate["attributes"]["description"]


def test_pages_of_the_root_name_files_that_are_there() -> None:
    for name in ("SECURITY.md", "CONTRIBUTING.md"):
        text = (REPOSITORY / name).read_text()
        links = [link.split("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)]
        assert links and all((REPOSITORY / link).exists() for link in links)
