"""Sections about right answers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trouper_lab.certify.certificate import Json
from trouper_lab.certify.section_run import (
    Comparison,
    ProbeAnswer,
    ProbeQuestion,
    SectionRun,
    compared,
    questions,
)
from trouper_lab.certify.server_runs import ServerRun

FULL_FLOAT32 = {"MLX_ENABLE_TF32": "0"}
"""Full float32 shows any fault beyond rounding."""
Job = tuple[str, str, str]
"""Family, quantized format or "", dtype."""
MAX_WORKERS = 6
QUICK_FAMILIES = ("llama", "gpt_oss", "qwen3_next")
QUANTIZED_FAMILIES = (
    "qwen3",
    "gpt_oss",
    "gemma3_text",
    "qwen3_moe",
    "deepseek_v3",
    "lfm2",
    "qwen3_next",
    "mamba2",
    "phi3",
)


def exactness(run: SectionRun) -> None:
    _scenarios(run)
    _through_http(run)


def _through_http(run: SectionRun) -> None:
    count, tokens = (3, 8) if run.quick else (8, 24) if run.on_cpu else (8, 64)
    greedy, seeded = questions(count, tokens), questions(count, tokens, seeded=True)
    run.show(0.38, "start of a server")
    with run.starter.trouper("--no-ssd") as server:
        check = server.health()["self_check"]
        off = "; ".join(f"{feature}: {reason}" for feature, reason in check["off"].items())
        run.result.notes.append(f"self-check of the start: {off or 'rows may do everything'}")
        found = _one_by_one(run, server, [*greedy, *seeded])
        alone, alone_seeded = found[:count], found[count:]
        run.show(0.75, "all at once")
        mixed = _all(server, [*greedy, *seeded], "together")
        _promise(
            run,
            "greedy answers in a batch are those of the row alone",
            compared(alone, mixed[:count]),
        )
        seeded_found = compared(alone_seeded, mixed[count:])
        _promise(
            run, "seeded answers in a batch are those of the row alone", seeded_found, seeded=True
        )
        run.show(0.85, "after a cache hit")
        warm = [ProbeAnswer.of(server.complete(question.body("alone"))) for question in greedy]
        _promise(run, "answers after a cache hit are those of a cold start", compared(alone, warm))
        warm_together = _all(server, [*greedy, *seeded], "alone")
        found_together = compared(alone, warm_together[:count])
        _promise(
            run,
            "answers in a batch after cache hits are those of a cold start alone",
            found_together,
        )
        run.show(0.95, "with drafts")
        drafted = _all(server, greedy, "drafts", speculation="ngram")
        _promise(run, "answers with drafts are those without", compared(alone, drafted))
    hit = sum(answer.cached_tokens for answer in warm)
    prompt = sum(answer.prompt_tokens for answer in warm)
    run.result.figures["cached_part_of_repeated_prompts"] = round(hit / prompt, 3)


def _one_by_one(
    run: SectionRun, server: ServerRun, requests: list[ProbeQuestion]
) -> list[ProbeAnswer]:
    answers = []
    for index, question in enumerate(requests):
        run.show(0.4 + 0.35 * index / len(requests), "each request alone")
        answers.append(ProbeAnswer.of(server.complete(question.body("alone"))))
    return answers


def _all(
    server: ServerRun, requests: list[ProbeQuestion], salt: str, **more: Any
) -> list[ProbeAnswer]:
    return [
        ProbeAnswer.of(body)
        for body in server.complete_all([question.body(salt, **more) for question in requests])
    ]


def _promise(run: SectionRun, text: str, found: Comparison, *, seeded: bool = False) -> None:
    """Equal tokens in full float32, near ties elsewhere. Seeded draws are only counted."""
    held: bool | None = found.within(run.near_tie)
    if seeded:
        held = not found.partings if run.exact else None
    run.result.promise(text, held, found.text(run.near_tie))


def _scenarios(run: SectionRun) -> None:
    rows: list[Json] = []
    run.show(0.05, "scenarios of the self-check")
    given = {"model": run.starter.model}
    for row in run.rows("scenarios", given, part=0.6, rest="further scenarios of the self-check"):
        rows.append(row)
        run.report(0.05 + 0.03 * len(rows), row["scenario"])
    compared_rows = [row for row in rows if not row["off"]]
    held = all(row["held"] for row in compared_rows)
    worst = max(
        (row["error"] / row["bound"] for row in compared_rows if row["error"] is not None),
        default=0.0,
    )
    differing = [row["scenario"] for row in compared_rows if not row["held"]]
    measured = f"{len(compared_rows)} scenarios, the largest error is {worst:.2g} of its bound"
    if differing:
        measured += f"; beyond it: {', '.join(differing)}"
    if compared_rows:
        known = None if held and run.not_reached else held
        run.result.promise(
            "rows of the model in every company are within rounding of mlx-lm's own loop",
            known,
            measured,
        )
    run.result.table(("scenario", "error", "bound"), [_scenario_row(row) for row in rows])


def _scenario_row(row: Json) -> tuple[str, str, str]:
    error = row["problem"] if row["error"] is None else f"{row['error']:.2g}"
    return row["scenario"], error, f"{row['bound']:.2g}" if row["bound"] else ""


def families(run: SectionRun) -> None:
    names = [name for name in run.device["families"] if not run.quick or name in QUICK_FAMILIES]
    _matrix(
        run,
        [(name, "", "float32") for name in names],
        "rows of every family in every company are mlx-lm's own, in float32",
    )


def quantized(run: SectionRun) -> None:
    """Quantized weights, in float32 and bfloat16."""
    if run.quick:
        jobs = [
            ("qwen3", run.device["formats"][0], "float32"),
            ("gpt_oss", run.device["formats"][0], "bfloat16"),
        ]
    else:
        kinds = [
            (kind, dtype) for dtype in ("float32", "bfloat16") for kind in run.device["formats"]
        ]
        jobs = [(name, kind, dtype) for kind, dtype in kinds for name in QUANTIZED_FAMILIES]
    exact = [job for job in jobs if job[2] == "float32"]
    rounded = [job for job in jobs if job[2] != "float32"]
    _matrix(run, exact, "rows over quantized weights are mlx-lm's own, in float32", share=0.5)
    _matrix(
        run,
        rounded,
        "rows over quantized weights are within rounding of mlx-lm's own, in bfloat16",
        begin=0.5,
        share=0.5,
    )


def _matrix(
    run: SectionRun, jobs: list[Job], promise: str, *, begin: float = 0.0, share: float = 1.0
) -> None:
    rows = _checked(run, jobs, begin, share)
    differing = [row for row in rows if row["differs"]]
    known = [row for row in rows if row["error"] is not None]
    worst = max(known, key=lambda row: row["error"] / row["bound"], default=None)
    measured = (
        f"{len(known)} of {len(jobs)} models" if len(known) < len(jobs) else f"{len(known)} models"
    )
    if worst is not None:
        measured += (
            f", the largest error is {worst['error']:.2g} where up to {worst['bound']:.2g} is "
            f"rounding ({worst['family']})"
        )
        run.result.figures[f"largest_error_{jobs[0][2]}"] = worst["error"]
    if differing:
        measured += f"; differ: {', '.join(_name(row) for row in differing)}"
    if without := [_name(row) for row in rows if row.get("no_kernel")]:
        measured += f"; MLX has no kernel here for {', '.join(without)}"
    reached = {_name(row) for row in rows}
    missing = [name for job in jobs if (name := _job_name(job)) not in reached]
    run.not_reached += missing
    run.result.promise(
        promise, False if differing else None if missing or not known else True, measured
    )
    columns = ("family", "weights", "error", "bound", "differs", "not allowed by its caches")
    run.result.table(columns, [_family_row(row) for row in rows])


def _checked(run: SectionRun, jobs: list[Job], begin: float, share: float) -> list[Json]:
    """Rows in time, in job order."""
    workers = 1 if run.on_cpu else max(1, min(MAX_WORKERS, (os.cpu_count() or 2) // 2, len(jobs)))
    rows: list[Json] = []

    def work(part: list[Job]) -> None:
        for row in run.rows(
            "families", {"jobs": part}, part=0.6 if begin + share < 1 else 1.0, more=FULL_FLOAT32
        ):
            rows.append(row)
            run.show(begin + share * len(rows) / len(jobs), _name(row))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, [jobs[first::workers] for first in range(workers)]))
    order = [_job_name(job) for job in jobs]
    return sorted(rows, key=lambda row: order.index(_name(row)))


def _job_name(job: Job) -> str:
    family, quantized, dtype = job
    return _name(
        {"family": family, "weights": " ".join(part for part in (quantized, dtype) if part)}
    )


def _name(row: Json) -> str:
    return f"{row['family']} ({row['weights']})"


def _family_row(row: Json) -> tuple[str, ...]:
    error = "" if row["error"] is None else f"{row['error']:.2g}"
    differs = "no kernel" if row.get("no_kernel") else row["differs"]
    return (
        row["family"],
        row["weights"],
        error,
        f"{row['bound']:.2g}",
        differs,
        ", ".join(row["off"]),
    )
