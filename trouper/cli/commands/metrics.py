"""`trouper metrics`: the dashboard and the alerts that belong to this version's metrics."""

from __future__ import annotations

from importlib.resources import files

import click

FOLDER = files("trouper.cli") / "dashboards"


@click.command()
@click.option("--grafana", "name", flag_value="grafana.json", help="Print a dashboard for Grafana.")
@click.option("--alerts", "name", flag_value="alerts.yml", help="Print rules for Prometheus.")
def metrics(name: str | None) -> None:
    """Print a dashboard or alerts for Grafana and Prometheus.

    \b
    trouper metrics --grafana > trouper.json     Grafana: Dashboards, New, Import
    trouper metrics --alerts > alerts.yml        prometheus.yml: rule_files: [alerts.yml]
    """  # noqa: D301 - click reads the backspace itself
    if name is None:
        raise click.UsageError(
            "give --grafana or --alerts; a server's figures are at its address, /metrics"
        )
    click.echo((FOLDER / name).read_text("utf-8"), nl=False)
