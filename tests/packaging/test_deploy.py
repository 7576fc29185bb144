"""deploy/: checked by the programs that read these files, as far as they are here. No daemon and no
cluster runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.installed import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def of(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(program, path=PATH) is None, reason=f"{program} is not installed"
    )


def run(*command: str, **variables: str) -> str:
    outcome = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": PATH} | variables,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


@of("haproxy")
@pytest.mark.parametrize(
    "variables", [{}, {"LISTEN": ":8000", "SERVER_A": "127.0.0.2:8000", "SMG": "127.0.0.3:1"}]
)
def test_haproxy_takes_its_configuration(variables: dict[str, str]) -> None:
    run("haproxy", "-c", "-dW", "-f", str(DEPLOY / "haproxy.cfg"), **variables)


@of("docker-compose")
def test_docker_compose_takes_the_file() -> None:
    run("docker-compose", "-f", str(DEPLOY / "compose.yml"), "config", TROUPER_API_KEY="k")


@of("check-jsonschema")
def test_the_compose_file_fits_the_schema_of_its_specification() -> None:
    run(
        "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(DEPLOY / "compose.yml"),
    )


@of("promtool")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    alerts = REPOSITORY / "trouper" / "cli" / "dashboards" / "alerts.yml"
    for path in (DEPLOY / "prometheus.yml", alerts):
        shutil.copy(path, tmp_path)
    run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))


def resources() -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())]


def test_the_manifest_fits_the_schemas_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for resource in resources():
        kubernetes_validate.validate(resource, "1.32", strict=True)


@of("kubectl")
def test_kustomize_puts_haproxys_configuration_into_the_manifest() -> None:
    made = [*yaml.safe_load_all(run("kubectl", "kustomize", str(DEPLOY)))]
    [configuration] = [one for one in made if one["kind"] == "ConfigMap"]
    assert configuration["data"] == {"haproxy.cfg": (DEPLOY / "haproxy.cfg").read_text()}
    [haproxy] = [one for one in made if one["kind"] == "Deployment"]
    [volume] = haproxy["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == configuration["metadata"]["name"]


def test_a_supervisor_waits_longer_than_the_drain() -> None:
    """docs/operating.md: 20 s longer than --drain-timeout-s."""
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    for name in ("trouper-a", "trouper-b"):
        service = compose["services"][name]
        drain = int(service["command"][-1])
        assert int(service["stop_grace_period"].removesuffix("s")) >= drain + 20
    pod = resources()[0]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= before + int(container["args"][-1]) + 20


def test_files_that_are_mounted_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
    ]
    paths = [path for path in mounted if path.startswith(".")]
    assert paths
    assert [path for path in paths if not (DEPLOY / path).is_file()] == []
