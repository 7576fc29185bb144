"""Every setting once: default, bounds, flag and help, for the CLI and docs/flags.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from trouper.protocol.hosts import host_pattern, is_loopback, origin_pattern
from trouper.protocol.media_domains import media_domain
from trouper.protocol.names import ADAPTER_FLAG, adapters_of
from trouper.protocol.output_formats import REASONING_PARSERS, TOOL_PARSERS, require_together
from trouper.protocol.paths import expanded, is_directory, xdg_directory
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.setting_fields import ByteSize, entries, setting, size

HUB_CACHE, LM_STUDIO, OLLAMA, OMLX = "hub-cache", "lm-studio", "ollama", "omlx"
NAMED_SOURCES = (HUB_CACHE, LM_STUDIO, OLLAMA, OMLX)
"""Sources of --models-from besides directories."""
FOUND_MODELS = 3


def default_cache_dir() -> Path:
    """Default directory of converted models and cached blocks. Raises `SettingsInvalid` for a user
    without a home directory."""
    return xdg_directory("XDG_CACHE_HOME", ".cache") / "trouper"


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of the runtime: model, batch, cache, time. Enough to embed without HTTP."""

    model: str | None = setting(
        None,
        "Local directory or hub id; several for several models. Nothing: the embedded "
        "SmolLM2-135M-Instruct.",
        each=True,
        directory=True,
    )
    adapter_path: str | None = setting(
        None, "Directory of LoRA adapters to apply to the model.", directory=True
    )
    adapter: tuple[str, ...] = setting(
        (),
        "NAME=DIR: a LoRA adapter that requests choose, as the model MODEL:NAME or NAME; PEFT's "
        "files or mlx-lm's.",
        repeat=True,
        directory=True,
    )
    draft_model: str | None = setting(
        None,
        "Directory or hub id of what drafts: a smaller model with the same vocabulary, or an "
        "EAGLE-3, DFlash or DSpark drafter; MODEL=DIR-OR-ID for one of several models.",
        each=True,
        directory=True,
    )
    completion_batch_size: int = setting(32, "Rows that decode together.", 1, 4096)
    max_batch_size: int | None = setting(
        None, "Older name for a bound on rows; the smaller of the two counts.", 1, 4096
    )
    prefill_batch_size: int = setting(32, "Prompts that prefill together.", 1, 256)
    prefill_step_size: int = setting(2048, "Most prompt tokens of one prefill chunk.", 1, 65536)
    decode_stall_ms: float = setting(
        300.0,
        "Longest pause that prefill may put between two tokens of a running stream.",
        1,
        60_000,
    )
    stream_interval: int = setting(
        1,
        "Tokens in each event of a stream but the first; more cost the server and the network "
        "less.",
        1,
        4096,
    )
    gather_ms: float = setting(
        3.0,
        "An idle engine waits so long for another request, so that a burst prefills "
        "together, unless the last few came alone; 0: never.",
        0,
        50,
    )
    priority_max_wait_s: float = setting(
        60.0,
        "A request that waits for a row longer than this goes before those of any priority; 0: "
        "never.",
        0,
    )
    batch_min_rows: int = setting(
        1,
        "Rows that requests of batches keep while other requests run or wait; more are preempted.",
        1,
        4096,
    )
    max_queue_size: int = setting(
        128, "Requests of one API key that may wait for a row; more are answered 429.", 0
    )
    default_max_tokens: int = setting(
        32768,
        "Most tokens of an answer when the request names no length; the context may leave fewer.",
        1,
    )
    sampling_defaults: str = setting(
        "model",
        "Sampling of requests that name none: as in generation_config.json, or OpenAI's.",
        choices=("model", "openai"),
    )
    max_prompt_tokens: int | None = setting(
        None, "Longer prompts are refused. Default: what the context, or --max-kv-size, holds.", 1
    )
    max_image_tokens: int = setting(
        4096, "Most tokens of an image; a larger one is made smaller.", 4, 65_536
    )
    context_length: int | None = setting(
        None,
        "Tokens of a sequence, in place of config.json's; longer only as the model's makers say.",
        32,
    )
    unread_config: str = setting(
        "refuse",
        "What becomes of a model whose config.json asks for what its code does not compute: refuse "
        "it, or name it in the log.",
        choices=("refuse", "name"),
    )
    max_kv_size: int | None = setting(
        None, "Most tokens (prompt and answer) of one row. Default: the model's context.", 32
    )
    queue_timeout_s: float = setting(60.0, "Longest wait for a row; 0: no limit.", 0)
    first_token_timeout_s: float = setting(
        120.0, "Longest time in which a prefill makes no progress; 0: no limit.", 0
    )
    token_timeout_s: float = setting(60.0, "Longest pause between two tokens; 0: no limit.", 0)
    request_timeout_s: float = setting(0.0, "Longest whole request; 0: no limit.", 0)
    grammar_timeout_s: float = setting(
        10.0, "A schema or grammar that takes longer to compile is refused.", 0.05, 600
    )
    stall_timeout_s: float = setting(
        60.0, "A step that takes longer makes /readyz 503; ten times as long ends the process.", 0.1
    )
    block_size: int = setting(64, "Tokens of one cache block.", 1, 1024)
    cache_memory: ByteSize | None = size(
        None,
        "Memory for cached blocks, as in 4GB; 0: cache nothing. Default: from the device's own "
        "memory.",
    )
    image_cache: ByteSize | None = size(
        None,
        "Memory for encoded images that no running request needs, as in 500MB; 0: keep none. "
        "Default: 1/32 of the KV memory.",
    )
    kv_memory: ByteSize | None = size(
        None,
        "Most memory of running rows and cached blocks together. Default: what the device has "
        "beside the weights.",
    )
    num_blocks: int | None = setting(None, "Also a bound on cached blocks, in blocks.", 1)
    snapshot_tokens: int = setting(
        512, "Models with sliding windows or recurrent state keep a snapshot of it this often.", 16
    )
    kv_bits: int = setting(
        0, "Bits of keys and values: 8, 4, or 0 for the model's own.", choices=(8, 4, 0)
    )
    kv_group_size: int = setting(
        64, "Values that share one quantization scale.", choices=(32, 64, 128)
    )
    self_check: str = setting(
        "fast",
        "Compare rows together with each row alone before a model serves, and turn off what "
        "differs. full: every case on the model itself, too. off: guess from its caches.",
        choices=("fast", "full", "off"),
    )
    speculation: str = setting(
        "auto",
        "Draft tokens, and verify them where that is faster. ngram: from the row's own text. "
        "draft_model: by --draft-model. mtp: by the checkpoint's head. off: do not. "
        "auto: whichever pays, but no n-grams on CUDA devices.",
        choices=("auto", "ngram", "draft_model", "mtp", "off"),
    )
    tool_parser: str = setting(
        "auto",
        "Format of the model's tool calls. auto: as its chat template writes them. `--tool-parser "
        "list` names all.",
        choices=TOOL_PARSERS,
        metavar="FORMAT",
    )
    reasoning_parser: str = setting(
        "auto",
        "Format of the model's reasoning. auto: by its tokens. `--reasoning-parser list` names "
        "all.",
        choices=REASONING_PARSERS,
        metavar="FORMAT",
    )
    special_tokens_in_content: bool = setting(
        False,
        "Let text of a message that looks like a special token be that token. Default: text is "
        "text.",
    )
    spec_ngram_min: int = setting(3, "Least tokens that must have stood somewhere before.", 1, 64)
    spec_ngram_max: int = setting(8, "The longest match is looked for up to so many tokens.", 1, 64)
    spec_draft_tokens: int = setting(16, "Most tokens that a row guesses at a time.", 1, 64)
    sequence_cache_size: int | None = setting(
        None,
        "Older name of a bound, without effect: --cache-memory bounds what is kept.",
        0,
    )
    pipeline: bool = setting(
        False,
        "With several ranks, give each consecutive layers instead of a part of every layer: for "
        "slow links.",
    )
    tp_reduce_dtype: str = setting(
        "native",
        "With several ranks, the type in which their parts are added: native (the model's own) or "
        "float32.",
        choices=("native", "float32"),
    )
    ssd_cache_dir: Path | None = setting(
        None, "Directory of the SSD tier. Default: in the user's cache directory.", directory=True
    )
    ssd_max_bytes: ByteSize = size(ByteSize("20GB"), "Most that the SSD tier holds.")
    ssd_keep_free: ByteSize = size(
        ByteSize("2GB"), "Nothing is written that would leave less of the disk free."
    )
    ssd_write_budget: ByteSize = size(
        ByteSize("50GB"), "Most that is written in an hour: disks wear."
    )
    ssd_ttl_days: float = setting(7.0, "Files unused for so long are removed.", 0)
    no_ssd: bool = setting(False, "Keep nothing on disk.")
    memory_fraction: float = setting(
        0.9, "Part of the device's memory that may be in use before requests wait.", 0.05, 1
    )
    no_wired_weights: bool = setting(
        False,
        "Where the device has a recommended working set (Metal): let the system page the weights "
        "out.",
    )
    buffer_cache: ByteSize | None = size(
        None,
        "Most that MLX keeps of freed buffers. Default: a 16th of the recommended working set, or "
        "as MLX has it.",
    )
    janitor_interval_s: float = setting(5.0, "How often memory and disk are looked at.", 0.05)
    seed: int | None = setting(None, "Seed for requests that name none; default: drawn for each.")
    control_host: str | None = setting(
        None,
        "Where rank 0 listens for the other ranks. Default: its address in what launched the "
        "ranks, or loopback.",
    )
    rank_secret_file: str | None = setting(
        None,
        "File with the secret of the ranks, the same on each machine, and its user's alone. "
        "`trouper launch` makes one for ranks on this machine. Default: a secret that travels "
        "through the ranks' own network.",
    )
    rank_timeout_s: float = setting(4.0, "A rank that is silent for so long is lost.", 0.5)
    collective_timeout_s: float = setting(
        60.0, "With several ranks, a step that takes longer is given up.", 1
    )

    def __attrs_post_init__(self) -> None:
        if self.model is not None and not self.model.strip():
            raise SettingsInvalid(
                "--model is empty; give a directory or a hub id, or leave the flag out", "--model"
            )
        if adapters_of(self.adapter) and self.adapter_path is not None:
            raise SettingsInvalid(
                f"{ADAPTER_FLAG} and --adapter-path exclude each other; name all adapters by "
                f"{ADAPTER_FLAG}"
            )
        require_together(self.tool_parser, self.reasoning_parser)
        if self.speculation == "draft_model" and self.draft_model is None:
            raise SettingsInvalid(
                "--speculation draft_model needs --draft-model; give one, or --speculation auto"
            )
        if self.spec_ngram_min > self.spec_ngram_max:
            raise SettingsInvalid("--spec-ngram-min must not be more than --spec-ngram-max")

    @property
    def blocks_dir(self) -> Path | None:
        """The cache directory; None without an SSD tier."""
        return None if self.no_ssd else Path(self.ssd_cache_dir or default_cache_dir() / "blocks")

    @property
    def rows(self) -> int:
        """Rows that decode together."""
        return min(self.completion_batch_size, self.max_batch_size or self.completion_batch_size)


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Settings of the HTTP server."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; of 127.0.0.1 and localhost, [::1] too. Anything but loopback needs "
        "--api-key or --allow-no-key.",
    )
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", 0, 65535)
    api_key: tuple[str, ...] = setting(
        (),
        "Key that clients must send. Or TROUPER_API_KEY.",
        repeat=True,
        secret=True,
        never_empty=True,
    )
    api_key_file: Path | None = setting(
        None,
        "File with one key a line, options behind it: name=batch models=small priority=5.",
        never_empty=True,
    )
    allow_no_key: bool = setting(
        False, "Listen beyond loopback although anybody may then use the model."
    )
    allow_admin_without_key: bool = setting(
        False,
        "Without keys, let others than programs on this machine load, unload and pin models, and "
        "load adapters.",
    )
    allowed_hosts: tuple[str, ...] = entries(
        host_pattern,
        "Names, parted by commas, that the server answers to beside those of loopback: NAME, "
        ".DOMAIN for it and all below it, * for any.",
    )
    cors_origins: tuple[str, ...] = entries(
        origin_pattern,
        "Origins, parted by commas, whose web pages may use the API, as in http://localhost:5173; "
        "* for any page's.",
    )
    allowed_media_domains: tuple[str, ...] = entries(
        media_domain,
        "Servers, parted by commas, from which images are fetched by address: NAME or *.NAME by "
        "https; http://NAME by http; private:NAME where its address is in your own network.",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Name of the model in the API, or NAME=MODEL for one of several. Default: what --model "
        "says.",
        repeat=True,
    )
    model_alias: tuple[str, ...] = setting(
        (),
        "PATTERN=MODEL: the model that answers to names which none has, as in 'claude-*=MODEL'; "
        "PATTERN alone: the first. "
        "Default: with one model it answers to any name; off: unknown names are refused.",
        repeat=True,
    )
    model_memory: ByteSize | None = size(
        None, "Memory for the weights of several models. Default: 0.7 of the device's."
    )
    models_from: tuple[str, ...] = setting(
        (),
        "Models that requests may name beside --model: hub-cache, lm-studio, ollama or omlx (what "
        "these have here), or a directory of models; several.",
        repeat=True,
    )
    adapters_from: tuple[str, ...] = setting(
        (),
        "Directory below which POST /v1/load_lora_adapter may load adapters, beside those that "
        "--adapter names; several.",
        repeat=True,
        directory=True,
    )
    max_loaded_models: int | None = setting(
        None,
        "Models that may be loaded at a time. Default: as many as --model has, at least 3 with "
        "--models-from.",
        1,
    )
    model_ttl_s: float = setting(
        0.0,
        "A model that nobody used for so long goes to sleep until the next request; 0: never.",
        0,
    )
    stored_responses: int = setting(
        1000,
        "Responses kept in --batch-dir for previous_response_id and GET /v1/responses/ID; 0: none.",
        0,
    )
    stored_responses_bytes: ByteSize = size(ByteSize("64MB"), "Most that they may take.")
    stored_responses_ttl_s: float = setting(
        86400.0, "Those that nobody used for so long are forgotten.", 0
    )
    batch_dir: Path | None = setting(
        None,
        "Directory of files, batches and stored responses. Default: in the user's cache directory.",
        directory=True,
    )
    no_batches: bool = setting(False, "Serve neither /v1/files nor /v1/batches.")
    batch_rows: int = setting(
        8,
        "Requests of batches that run at a time, when no other request needs their rows.",
        1,
        4096,
    )
    batch_max_bytes: ByteSize = size(ByteSize("10GB"), "Most that files and batches take on disk.")
    max_file_bytes: ByteSize = size(ByteSize("200MB"), "Larger files are refused (413).")
    strict: bool = setting(
        False,
        "Refuse every parameter and path that the API does not have, and lengths beyond the "
        "context. Default: what an answer is right without is read past and named in a header.",
    )
    drain_timeout_s: float = setting(10.0, "On SIGTERM, how long running requests may finish.", 0)
    heartbeat_s: float = setting(4.0, "A silent stream gets a heartbeat this often.", 0.05)
    write_timeout_s: float = setting(
        30.0, "A client that reads nothing for so long is cut off.", 0.05
    )
    header_timeout_s: float = setting(
        20.0, "A client has so long to send a request's headers.", 0.05
    )
    body_timeout_s: float = setting(30.0, "A client has so long to send a request's body.", 0.05)
    keep_alive_timeout_s: float = setting(75.0, "An idle connection is closed after so long.", 0.05)
    max_body_bytes: int | None = setting(
        None,
        "Larger request bodies are refused (413). Default: 32 MiB, and 64 MiB while a model is "
        "loaded that takes images.",
        1024,
    )
    request_memory: ByteSize | None = size(
        None,
        "Memory for bodies, waiting prompts and answers that are not sent yet. Beyond it requests "
        "are refused. Default: a 16th of main memory, at most 1GB, at least 8 times "
        "--max-body-bytes.",
    )
    max_connections: int = setting(
        1000,
        "Connections at a time, as far as the limit on open files allows; idle ones give way.",
        1,
    )

    def __attrs_post_init__(self) -> None:
        """Check what depends on several settings. Raises `SettingsInvalid`."""
        given: object = self.api_key
        if isinstance(given, str):  # Each character would be a key, and an empty text none.
            raise SettingsInvalid("--api-key: give a tuple of keys, not one text", "--api-key")
        if self.host.startswith("["):
            message = (
                f"--host {self.host}: give the address without brackets, as in --host "
                f"{self.host.strip('[]')}"
            )
            raise SettingsInvalid(message, "--host")
        if not self.host.strip() or "/" in self.host or self.host.count(":") == 1:
            # One colon is in no address of IPv6.
            message = (
                f"--host {self.host!r} is no address: give it alone, as in --host 127.0.0.1, and "
                "the port by --port"
            )
            raise SettingsInvalid(message, "--host")
        has_keys = bool(self.api_key or self.api_key_file)
        if not (is_loopback(self.host) or has_keys or self.allow_no_key):
            raise SettingsInvalid(
                f"--host {self.host} lets other machines in: give --api-key (or TROUPER_API_KEY, "
                "--api-key-file), or --allow-no-key if anybody may use the model"
            )
        require_sources(self.models_from)
        require_directories(self.adapters_from)

    def body_limit(self, *, images: bool = False) -> int:
        """Most bytes of a body. `images`: whether a model takes images."""
        return self.max_body_bytes or (64 if images else 32) * 2**20

    @property
    def state_dir(self) -> Path:
        """The directory of files, batches and stored responses."""
        return Path(self.batch_dir or default_cache_dir() / "batches")

    @property
    def batches_dir(self) -> Path | None:
        """The directory of files and batches; None if off."""
        return None if self.no_batches else self.state_dir

    def max_models(self, given: int) -> int:
        """Number of models loaded at a time, if --model names `given`."""
        if not self.models_from:
            return min(given, self.max_loaded_models or given)
        return self.max_loaded_models or max(given, FOUND_MODELS)


def require_sources(models_from: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for a --models-from that is neither a name nor a directory."""
    missing = [
        one
        for one in models_from
        if one not in NAMED_SOURCES and not (one and is_directory(expanded(one)))
    ]
    if missing:
        raise SettingsInvalid(
            f"--models-from {missing[0] or repr('')} is no directory; give one, or {HUB_CACHE}",
            "--models-from",
        )


def require_directories(adapters_from: Sequence[str]) -> None:
    """Raises `SettingsInvalid` for an --adapters-from that is no directory."""
    missing = [one for one in adapters_from if not (one.strip() and is_directory(expanded(one)))]
    if missing:
        raise SettingsInvalid(
            f"--adapters-from {missing[0] or repr('')} is no directory; give one", "--adapters-from"
        )
