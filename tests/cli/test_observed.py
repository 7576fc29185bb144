"""The real process: it says where it serves, it is watched in every way at once (metrics, a log of
JSON, traces to a collector), and it leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
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
    "--default-max-tokens",
    "16",
)
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}).encode()


def fetched(url: str, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine-1"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return str(answer.read().decode())


def pasted(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.long(but=("15",))
def test_a_process_says_where_it_serves_is_observed_and_leaves(
    tmp_path: Path, number: signal.Signals
) -> None:
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
            found = re.search(r"ready at (http://127.0.0.1:\d+)", process.stdout.readline())
            assert found is not None
            assert process.stdout.readline().endswith("/docs\n")
            curl, *client = [process.stdout.readline() for _ in range(5)]
            fetched(f"{found[1]}/v1/completions", BODY)
            metrics = [*text_string_to_metric_families(fetched(f"{found[1]}/metrics"))]
            assert curl.startswith("curl http://127.0.0.1:")
            answer = json.loads(pasted("sh", "-c", curl))
            assert answer["choices"][0]["message"]["content"]
            assert pasted(sys.executable, "-c", "".join(client))
            process.send_signal(number)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
        traces = [sorted(span.name for span in spans) for spans in collector.traces]
    assert process.returncode == 0, log
    assert f"{number.name}: leaving" in log
    samples = {sample.name: sample.value for family in metrics for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 3
    assert samples["trouper_memory_active_bytes"] > 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.splitlines()]
    [line] = [one for one in lines if one.get("request_id") == "mine-1"]
    assert (line["event"], line["reason"], line["generated_tokens"]) == ("request", "length", 3)
    assert len(traces) == 3
    [names] = [names for names in traces if names[0] == "POST /v1/completions"]
    assert names[1:4] == ["decode", "prefill", "queue"]
    assert re.fullmatch(r"text_completion .*tiny", names[4])
