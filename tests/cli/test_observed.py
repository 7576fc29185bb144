"""The real process, watched in every way at once: metrics, a log of JSON, traces to a collector;
and it leaves as always."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.families import save
from tests.otlp import collecting

SERVE = (
    sys.executable,
    "-c",
    "from trouper.cli import main; main()",
    "serve",
    "--port",
    "0",
    "--no-ssd",
)
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}).encode()


def fetched(url: str, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine-1"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return str(answer.read().decode())


def test_metrics_logs_and_traces_of_a_process(tmp_path: Path) -> None:
    command = (*SERVE, "--model", str(save("llama", tmp_path / "tiny")))
    with collecting() as collector:
        process = subprocess.Popen(
            (*command, "--otlp-endpoint", collector.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+?:\d+", process.stdout.readline())
            assert found is not None
            fetched(f"{found[0]}/v1/completions", BODY)
            metrics = [*text_string_to_metric_families(fetched(f"{found[0]}/metrics"))]
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        [spans] = collector.traces
    assert process.returncode == 0, log
    samples = {sample.name: sample.value for family in metrics for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 3
    assert samples["trouper_memory_active_bytes"] > 0
    [line] = [one for one in map(json.loads, log.splitlines()) if one.get("event") == "request"]
    assert (line["request_id"], line["reason"], line["generated_tokens"]) == ("mine-1", "length", 3)
    names = sorted(span.name for span in spans)
    assert names[0] == "POST /v1/completions"
    assert names[1:4] == ["decode", "prefill", "queue"]
    assert re.fullmatch(r"text_completion .*tiny", names[4])
