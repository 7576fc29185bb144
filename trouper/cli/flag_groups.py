"""Groups of the flags of `trouper serve`: for its help and for docs/flags.md."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import click

from trouper.cli.foreign_flags import require_own

# In each group the most used flags are first, by the names of the parameters.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model",
        "served_model_name",
        "model_alias",
        "context_length",
        "adapter",
        "adapter_path",
        "adapters_from",
        "tool_parser",
        "reasoning_parser",
        "special_tokens_in_content",
        "seed",
        "self_check",
        "unread_config",
    ),
    "Network": (
        "host",
        "port",
        "allowed_hosts",
        "cors_origins",
        "allowed_media_domains",
        "max_connections",
    ),
    "API keys": ("api_key", "api_key_file", "allow_no_key", "allow_admin_without_key"),
    "Limits of a request": (
        "max_kv_size",
        "default_max_tokens",
        "sampling_defaults",
        "max_prompt_tokens",
        "max_image_tokens",
        "max_body_bytes",
        "max_queue_size",
        "strict",
    ),
    "Memory and cache": (
        "kv_memory",
        "cache_memory",
        "kv_bits",
        "kv_group_size",
        "memory_fraction",
        "image_cache",
        "request_memory",
        "buffer_cache",
        "no_wired_weights",
        "block_size",
        "num_blocks",
        "snapshot_tokens",
        "janitor_interval_s",
    ),
    "Disk": (
        "no_ssd",
        "ssd_cache_dir",
        "ssd_max_bytes",
        "ssd_keep_free",
        "ssd_write_budget",
        "ssd_ttl_days",
    ),
    "Several models": ("models_from", "max_loaded_models", "model_memory", "model_ttl_s"),
    "Drafts": (
        "speculation",
        "draft_model",
        "spec_draft_tokens",
        "spec_ngram_min",
        "spec_ngram_max",
    ),
    "Settings, logs and traces": (
        "config",
        "print_config",
        "log_level",
        "log_format",
        "otlp_endpoint",
    ),
    "Scheduling": (
        "completion_batch_size",
        "prefill_batch_size",
        "prefill_step_size",
        "decode_stall_ms",
        "stream_interval",
        "gather_ms",
        "priority_max_wait_s",
    ),
    "Time limits": (
        "queue_timeout_s",
        "first_token_timeout_s",
        "token_timeout_s",
        "request_timeout_s",
        "grammar_timeout_s",
        "stall_timeout_s",
        "drain_timeout_s",
        "heartbeat_s",
        "write_timeout_s",
        "header_timeout_s",
        "body_timeout_s",
        "keep_alive_timeout_s",
    ),
    "Files, batches and stored responses": (
        "batch_dir",
        "no_batches",
        "batch_rows",
        "batch_min_rows",
        "batch_max_bytes",
        "max_file_bytes",
        "stored_responses",
        "stored_responses_bytes",
        "stored_responses_ttl_s",
    ),
    "Ranks": (
        "control_host",
        "rank_secret_file",
        "rank_timeout_s",
        "collective_timeout_s",
        "pipeline",
        "tp_reduce_dtype",
    ),
}
HELP_ORDER = {name: index for index, name in enumerate(chain(*GROUPS.values()))}
# Accepted, in no help.
OLDER = ("max_batch_size", "sequence_cache_size")
OLDER_TITLE = "Older names"
HELP_WIDTH = 100


class GroupedCommand(click.Command):
    """A command with the flags of `serve`, in groups. Other servers' flags are refused with what
    they are here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = (*args,)  # click empties the list.
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            require_own(error, arguments)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = self._rows(ctx)
        own = [row for name, row in rows.items() if name not in HELP_ORDER]
        with formatter.section("Options"):
            formatter.write_dl(own)
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([rows[name] for name in names if name in rows])

    def _rows(self, ctx: click.Context) -> dict[str, tuple[str, str]]:
        records = {
            str(parameter.name): parameter.get_help_record(ctx)
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option) and parameter.name not in OLDER
        }
        return {name: record for name, record in records.items() if record is not None}


class CommandWithFlagsOfServe(GroupedCommand):
    """A command whose help shows its own flags and names `trouper serve --help` for the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        of_serve = HELP_ORDER.keys() - {"config"}
        rows = self._rows(ctx)
        with formatter.section("Options"):
            formatter.write_dl([row for name, row in rows.items() if name not in of_serve])
        formatter.write_paragraph()
        formatter.write_text("Settings of `trouper serve`, too: `trouper serve --help` lists them.")
