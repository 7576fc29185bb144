"""Flags and variables of other servers, and what each is here: for errors and for
docs/coming-from.md.

Sources, read in November 2026: vllm/engine/arg_utils.py and vllm/entrypoints/openai/cli_args.py;
sglang's docs/advanced_features/server_arguments.md; llama.cpp's tools/server/README.md;
mlx_lm/server.py; vllm_mlx/cli.py; LM Studio's `lms load` and `lms server start`; ollama's
envconfig/config.go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import click

VLLM = "vLLM"
SGLANG = "SGLang"
LLAMA = "llama.cpp"
MLX_LM = "mlx_lm.server"
VLLM_MLX = "vllm-mlx"
LM_STUDIO = "LM Studio"
OLLAMA = "ollama"
SERVERS = (OLLAMA, LM_STUDIO, LLAMA, MLX_LM, VLLM, SGLANG, VLLM_MLX)


@attrs.frozen(eq=False)
class ForeignFlag:
    """Names of one thing in other servers, by server, parted by blanks."""

    here: str
    """The flag of `trouper serve`, with its value; empty if there is none."""
    remark: str
    names: Mapping[str, str]

    def meaning(self, quote: str = "") -> str:
        """What the thing is here. `quote`: around the flag."""
        if not self.here:
            return self.remark
        flag = f"{quote}{self.here}{quote}"
        return f"{flag} ({self.remark})" if self.remark else flag


AUTOMATIC = "on by itself here; leave it out"
NOTHING_TO_CHOOSE = "nothing to choose here; leave it out"
CHECKPOINTS_OWN = "the checkpoint says it here; leave it out"
IN_REQUESTS = "requests say it here, each for itself"

FOREIGN_FLAGS = (
    # The model
    ForeignFlag(
        "MODEL",
        "a directory or a hub id; GGUF is not read: take the model of mlx-community",
        {
            LLAMA: "-m -hf -hfr --hf-repo -hff --hf-file -mu --model-url -dr --docker-repo",
            SGLANG: "--model-path",
        },
    ),
    ForeignFlag(
        "--served-model-name NAME",
        "",
        {LLAMA: "-a --alias", LM_STUDIO: "--identifier", VLLM: "--served-model-name"},
    ),
    ForeignFlag(
        "",
        "the tokenizer in the model's directory is taken; leave it out",
        {
            VLLM: "--tokenizer --tokenizer-mode --skip-tokenizer-init --tokenizer-revision",
            SGLANG: "--tokenizer-path --tokenizer-mode --skip-tokenizer-init",
        },
    ),
    ForeignFlag(
        "",
        "a hub id means its main revision; for another give its directory",
        {VLLM: "--revision --code-revision", SGLANG: "--revision"},
    ),
    ForeignFlag(
        "",
        "the variable HF_HOME moves the hub's cache",
        {VLLM: "--download-dir", SGLANG: "--download-dir", OLLAMA: "OLLAMA_MODELS"},
    ),
    ForeignFlag(
        "",
        "the variable HF_TOKEN has the hub's token",
        {VLLM: "--hf-token", LLAMA: "-hft --hf-token"},
    ),
    ForeignFlag(
        "",
        "the variable HF_HUB_OFFLINE=1 keeps the server from the hub",
        {LLAMA: "--offline", VLLM_MLX: "--offline --local-files-only"},
    ),
    ForeignFlag(
        "",
        "code of a model's repository is never run here",
        {
            VLLM: "--trust-remote-code",
            SGLANG: "--trust-remote-code",
            MLX_LM: "--trust-remote-code",
            VLLM_MLX: "--trust-remote-code",
        },
    ),
    ForeignFlag(
        "",
        CHECKPOINTS_OWN,
        {
            VLLM: "--dtype --load-format --hf-overrides --rope-theta --model-impl",
            SGLANG: "--dtype --load-format --json-model-override-args --model-impl",
            LLAMA: (
                "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
                "--override-kv"
            ),
            VLLM_MLX: "--dtype",
        },
    ),
    ForeignFlag(
        "",
        "take a checkpoint that is quantized already, as mlx-community has",
        {VLLM: "--quantization -q", SGLANG: "--quantization", VLLM_MLX: "--quantize --q-bits"},
    ),
    ForeignFlag(
        "",
        "another chat template goes into chat_template.jinja of the model's directory",
        {
            VLLM: "--chat-template",
            SGLANG: "--chat-template --hf-chat-template-name",
            LLAMA: "--chat-template --chat-template-file",
            MLX_LM: "--chat-template",
        },
    ),
    ForeignFlag(
        "",
        "requests say it here, by chat_template_kwargs",
        {
            VLLM: "--default-chat-template-kwargs",
            LLAMA: "--chat-template-kwargs",
            MLX_LM: "--chat-template-args",
            VLLM_MLX: "--default-chat-template-kwargs --enable-thinking",
        },
    ),
    ForeignFlag(
        "",
        AUTOMATIC,
        {
            LLAMA: (
                "--jinja -cb --cont-batching -fa --flash-attn --cache-prompt --metrics --slots "
                "--cache-reuse --embedding --embeddings --rerank --reranking --slot-save-path "
                "--kv-unified -kvu"
            ),
            VLLM: (
                "--enable-auto-tool-choice --enable-prefix-caching --enable-chunked-prefill "
                "--enable-prompt-tokens-details --enable-request-id-headers --async-scheduling "
                "--enable-reasoning --scheduling-policy --enable-sleep-mode"
            ),
            SGLANG: (
                "--enable-metrics --enable-cache-report --enable-multimodal "
                "--enable-priority-scheduling --enable-hierarchical-cache"
            ),
            MLX_LM: "--use-default-chat-template",
            VLLM_MLX: (
                "--continuous-batching --enable-auto-tool-choice --enable-prefix-cache "
                "--use-paged-cache --enable-metrics --mllm"
            ),
            OLLAMA: "OLLAMA_FLASH_ATTENTION",
        },
    ),
    ForeignFlag(
        "--tool-parser FORMAT",
        "by itself what the chat template writes",
        {
            VLLM: "--tool-call-parser --tool-parser-plugin",
            SGLANG: "--tool-call-parser",
            VLLM_MLX: "--tool-call-parser",
        },
    ),
    ForeignFlag(
        "--reasoning-parser FORMAT",
        "by itself what the model's tokens say",
        {
            LLAMA: "--reasoning-format",
            VLLM: "--reasoning-parser",
            SGLANG: "--reasoning-parser",
            VLLM_MLX: "--reasoning-parser",
        },
    ),
    ForeignFlag(
        "",
        "requests say it here, by thinking_token_budget and reasoning_effort",
        {
            LLAMA: "--reasoning-budget -rea --reasoning --reasoning-effort",
            VLLM_MLX: "--default-thinking-token-budget",
        },
    ),
    ForeignFlag(
        "",
        "nothing is hidden here: a vision model's directory has its projector",
        {LLAMA: "-mm --mmproj -mmu --mmproj-url --no-mmproj"},
    ),
    ForeignFlag(
        "--max-image-tokens N",
        "for each image",
        {LLAMA: "--image-max-tokens", VLLM: "--limit-mm-per-prompt --mm-processor-kwargs"},
    ),
    # Length
    ForeignFlag(
        "--max-kv-size N",
        "prompt and answer of one conversation; by itself the model's context",
        {
            VLLM: "--max-model-len",
            LLAMA: "-c --ctx-size",
            LM_STUDIO: "-c",
            OLLAMA: "OLLAMA_CONTEXT_LENGTH --num-ctx",
            VLLM_MLX: "--max-request-tokens",
        },
    ),
    ForeignFlag(
        "--context-length N",
        "in place of config.json's; --max-kv-size N bounds it",
        {SGLANG: "--context-length", LM_STUDIO: "--context-length", VLLM: "--rope-scaling"},
    ),
    ForeignFlag(
        "--default-max-tokens N",
        "",
        {
            MLX_LM: "--max-tokens",
            LLAMA: "-n --predict --n-predict",
            VLLM_MLX: "--max-tokens",
        },
    ),
    ForeignFlag(
        "",
        "a full context ends the answer here (finish_reason length); leave it out",
        {LLAMA: "--context-shift --keep"},
    ),
    # Rows and scheduling
    ForeignFlag(
        "--completion-batch-size N",
        "rows that decode together",
        {
            VLLM: "--max-num-seqs",
            SGLANG: "--max-running-requests",
            LLAMA: "-np --parallel",
            MLX_LM: "--decode-concurrency",
            VLLM_MLX: "--max-num-seqs --completion-batch-size",
            LM_STUDIO: "--parallel",
            OLLAMA: "OLLAMA_NUM_PARALLEL",
        },
    ),
    ForeignFlag(
        "--prefill-batch-size N",
        "prompts that prefill together",
        {
            SGLANG: "--prefill-max-requests",
            MLX_LM: "--prompt-concurrency",
            VLLM_MLX: "--prefill-batch-size",
        },
    ),
    ForeignFlag(
        "--prefill-step-size N",
        "tokens of one prefill chunk",
        {
            VLLM: "--max-num-batched-tokens",
            SGLANG: "--chunked-prefill-size --max-prefill-tokens",
            LLAMA: "-b --batch-size -ub --ubatch-size",
            MLX_LM: "--prefill-step-size",
            VLLM_MLX: "--prefill-step-size --chunked-prefill-tokens",
        },
    ),
    ForeignFlag(
        "--max-queue-size N",
        "for each API key",
        {SGLANG: "--max-queued-requests", OLLAMA: "OLLAMA_MAX_QUEUE"},
    ),
    ForeignFlag(
        "--stream-interval N",
        "",
        {
            VLLM: "--stream-interval",
            SGLANG: "--stream-interval",
            VLLM_MLX: "--stream-interval",
        },
    ),
    ForeignFlag(
        "",
        "the order is by priority, then by key, then first come",
        {SGLANG: "--schedule-policy --schedule-conservativeness"},
    ),
    # Memory and cache
    ForeignFlag(
        "--memory-fraction 0.9",
        "of the device's memory; --kv-memory SIZE bounds keys and values",
        {
            VLLM: "--gpu-memory-utilization",
            SGLANG: "--mem-fraction-static",
            VLLM_MLX: "--gpu-memory-utilization",
        },
    ),
    ForeignFlag(
        "--kv-memory SIZE",
        "",
        {
            VLLM: "--kv-cache-memory-bytes",
            SGLANG: "--max-total-tokens",
            VLLM_MLX: "--memory-budget-gb",
        },
    ),
    ForeignFlag(
        "--cache-memory SIZE",
        "as in 4GB, of however many prompts",
        {
            LLAMA: "-cram --cache-ram",
            MLX_LM: "--prompt-cache-size --prompt-cache-bytes",
            VLLM_MLX: "--cache-memory-mb --cache-memory-percent --prefix-cache-size",
        },
    ),
    ForeignFlag(
        "--cache-memory 0",
        "it turns the cache of prompts off",
        {
            VLLM: "--no-enable-prefix-caching",
            SGLANG: "--disable-radix-cache",
            LLAMA: "--no-cache-prompt",
            VLLM_MLX: "--disable-prefix-cache",
        },
    ),
    ForeignFlag(
        "--kv-bits 8",
        "or 4; by itself keys and values are not quantized",
        {
            VLLM: "--kv-cache-dtype",
            SGLANG: "--kv-cache-dtype",
            LLAMA: "-ctk --cache-type-k -ctv --cache-type-v",
            VLLM_MLX: "--kv-cache-quantization --kv-cache-quantization-bits",
            OLLAMA: "OLLAMA_KV_CACHE_TYPE",
        },
    ),
    ForeignFlag(
        "--kv-group-size N",
        "",
        {VLLM_MLX: "--kv-cache-quantization-group-size"},
    ),
    ForeignFlag(
        "--block-size N",
        "",
        {
            VLLM: "--block-size",
            SGLANG: "--page-size",
            VLLM_MLX: "--paged-cache-block-size",
        },
    ),
    ForeignFlag(
        "--num-blocks N",
        "",
        {VLLM: "--num-gpu-blocks-override", VLLM_MLX: "--max-cache-blocks"},
    ),
    ForeignFlag(
        "--ssd-max-bytes SIZE",
        "the cache goes to disk by itself",
        {
            VLLM: "--swap-space --kv-offloading-size",
            SGLANG: "--hicache-size --hicache-ratio --hicache-storage-backend",
            VLLM_MLX: "--ssd-cache-max-gb",
        },
    ),
    ForeignFlag("--ssd-cache-dir DIR", "", {VLLM_MLX: "--ssd-cache-dir"}),
    ForeignFlag(
        "",
        "the whole model is on the device here: take a smaller one if it does not fit",
        {
            LLAMA: (
                "-ngl --gpu-layers --n-gpu-layers -ot --override-tensor -cmoe --cpu-moe -ncmoe "
                "--n-cpu-moe -nkvo --no-kv-offload -fit --fit"
            ),
            VLLM: "--cpu-offload-gb",
            SGLANG: "--cpu-offload-gb",
            LM_STUDIO: "--gpu",
            OLLAMA: "OLLAMA_GPU_OVERHEAD",
        },
    ),
    ForeignFlag(
        "",
        "weights stay in memory by themselves on Metal",
        {LLAMA: "--mlock --no-mmap --mmap -lm --load-mode"},
    ),
    # The device
    ForeignFlag(
        "",
        NOTHING_TO_CHOOSE,
        {
            VLLM: (
                "--enforce-eager --compilation-config -O --attention-backend --device --task "
                "--runner --structured-outputs-config --guided-decoding-backend "
                "--distributed-executor-backend --disable-log-stats --api-server-count"
            ),
            SGLANG: (
                "--attention-backend --sampling-backend --grammar-backend --disable-cuda-graph "
                "--cuda-graph-max-bs --enable-torch-compile --device --is-embedding "
                "--skip-server-warmup"
            ),
            LLAMA: "--warmup --no-warmup -dev --device -mg --main-gpu --numa --prio --poll",
            VLLM_MLX: "--cache-policy --prefix-trie-cache",
        },
    ),
    ForeignFlag(
        "",
        "only on CPUs: the variable OPENBLAS_NUM_THREADS",
        {LLAMA: "-t --threads -tb --threads-batch --threads-http"},
    ),
    ForeignFlag(
        "",
        "several GPUs or machines: `trouper launch -n N -- serve ...`",
        {
            VLLM: "--tensor-parallel-size -tp",
            SGLANG: "--tensor-parallel-size --tp-size --tp --nnodes --node-rank --dist-init-addr",
            LLAMA: "-sm --split-mode -ts --tensor-split --rpc",
            OLLAMA: "OLLAMA_SCHED_SPREAD",
        },
    ),
    ForeignFlag(
        "--pipeline",
        "of ranks: `trouper launch -n N -- serve ...`",
        {
            VLLM: "--pipeline-parallel-size -pp",
            SGLANG: "--pipeline-parallel-size --pp-size",
            MLX_LM: "--pipeline",
        },
    ),
    ForeignFlag(
        "",
        "`trouper launch -n N -- serve ...` divides each layer instead",
        {VLLM: "--enable-expert-parallel", SGLANG: "--ep-size"},
    ),
    ForeignFlag(
        "",
        "start several servers behind a router",
        {VLLM: "--data-parallel-size -dp", SGLANG: "--data-parallel-size --dp-size --dp"},
    ),
    # Drafts
    ForeignFlag(
        "--draft-model DIR-OR-ID",
        "by itself the server drafts without one",
        {
            VLLM: "--speculative-config --speculative-model",
            SGLANG: "--speculative-draft-model-path --speculative-draft-model",
            LLAMA: "-md --model-draft --spec-draft-model -hfd --hf-repo-draft",
            MLX_LM: "--draft-model",
        },
    ),
    ForeignFlag(
        "--speculation mtp",
        "or ngram, draft_model, off; by itself whichever pays",
        {
            SGLANG: "--speculative-algorithm --speculative-algo",
            LLAMA: "--spec-type --spec-default",
            VLLM_MLX: "--enable-mtp",
        },
    ),
    ForeignFlag(
        "--spec-draft-tokens N",
        "",
        {
            VLLM: "--num-speculative-tokens",
            SGLANG: "--speculative-num-draft-tokens --speculative-num-steps",
            LLAMA: "--spec-draft-n-max --draft --draft-n --draft-max",
            MLX_LM: "--num-draft-tokens",
            VLLM_MLX: "--mtp-num-draft-tokens",
        },
    ),
    ForeignFlag(
        "",
        "prompts are never shortened by a draft model here; leave it out",
        {VLLM_MLX: "--specprefill --specprefill-draft-model"},
    ),
    # Adapters
    ForeignFlag(
        "--adapter NAME=DIR",
        "PEFT's files or mlx-lm's; nothing else to turn on",
        {
            VLLM: "--lora-modules --enable-lora --max-loras --max-lora-rank --max-cpu-loras",
            SGLANG: "--lora-paths --enable-lora --max-loras-per-batch --max-lora-rank",
            LLAMA: "--lora --lora-scaled",
        },
    ),
    ForeignFlag("--adapter-path DIR", "", {MLX_LM: "--adapter-path"}),
    # Several models
    ForeignFlag(
        "--models-from DIR",
        "or hub-cache; requests name the model",
        {LLAMA: "--models-dir --models-preset", VLLM_MLX: "--models-config --lazy-load-model"},
    ),
    ForeignFlag(
        "--max-loaded-models N",
        "",
        {LLAMA: "--models-max", OLLAMA: "OLLAMA_MAX_LOADED_MODELS"},
    ),
    ForeignFlag(
        "--model-ttl-s SECONDS",
        "an unused model sleeps; by itself it never does",
        {
            LLAMA: "--sleep-idle-seconds",
            LM_STUDIO: "--ttl",
            VLLM_MLX: "--auto-unload-idle-seconds",
            OLLAMA: "OLLAMA_KEEP_ALIVE",
        },
    ),
    ForeignFlag(
        "",
        "name that model by --model, too",
        {VLLM_MLX: "--embedding-model --rerank-model"},
    ),
    # Network and keys
    ForeignFlag("--host ADDRESS", "", {OLLAMA: "OLLAMA_HOST", VLLM: "--host"}),
    ForeignFlag(
        "",
        "no TLS here: put a proxy before the server, as Caddy or nginx",
        {
            VLLM: "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs",
            LLAMA: "--ssl-key-file --ssl-cert-file",
        },
    ),
    ForeignFlag(
        "--cors-origins URL",
        "",
        {
            VLLM: "--allowed-origins",
            MLX_LM: "--allowed-origins",
            LLAMA: "--cors-origins",
            LM_STUDIO: "--cors",
            OLLAMA: "OLLAMA_ORIGINS",
        },
    ),
    ForeignFlag(
        "",
        "--cors-origins allows all that browsers need",
        {
            VLLM: "--allow-credentials --allowed-methods --allowed-headers",
            LLAMA: "--cors-methods --cors-headers --cors-credentials",
        },
    ),
    ForeignFlag(
        "",
        "no Unix sockets and no prefixes of paths here: a proxy has both",
        {
            VLLM: "--uds --root-path",
            SGLANG: "--fastapi-root-path",
            LLAMA: "--api-prefix --reuse-port",
        },
    ),
    ForeignFlag(
        "--api-key KEY",
        "--api-key-file gives keys rights and limits",
        {
            VLLM: "--api-key",
            SGLANG: "--api-key --admin-api-key",
            LLAMA: "--api-key",
            VLLM_MLX: "--api-key --rate-limit",
        },
    ),
    ForeignFlag(
        "--request-timeout-s SECONDS",
        "by itself there is none",
        {LLAMA: "-to --timeout", VLLM_MLX: "--timeout"},
    ),
    ForeignFlag(
        "--stall-timeout-s SECONDS",
        "",
        {SGLANG: "--watchdog-timeout --soft-watchdog-timeout"},
    ),
    ForeignFlag("--heartbeat-s SECONDS", "", {LLAMA: "--sse-ping-interval"}),
    # Sampling
    ForeignFlag(
        "",
        IN_REQUESTS,
        {
            MLX_LM: "--temp --top-p --top-k --min-p",
            LLAMA: (
                "--temp --temperature --top-k --top-p --min-p --typical-p --repeat-penalty "
                "--presence-penalty --frequency-penalty --samplers --mirostat --grammar "
                "--grammar-file -j --json-schema --logit-bias --ignore-eos"
            ),
            VLLM: "--generation-config --override-generation-config --max-logprobs",
            SGLANG: "--sampling-defaults --preferred-sampling-params",
            VLLM_MLX: (
                "--default-temperature --default-top-p --default-top-k --default-min-p "
                "--default-repetition-penalty --default-presence-penalty"
            ),
        },
    ),
    ForeignFlag("--seed N", "", {VLLM: "--seed", SGLANG: "--random-seed", LLAMA: "-s --seed"}),
    # Logs and extras
    ForeignFlag(
        "--log-level debug",
        "or info, warning, error",
        {
            VLLM: "--uvicorn-log-level",
            SGLANG: "--log-level-http",
            LLAMA: "-v --verbose -lv --verbosity --log-verbosity",
            MLX_LM: "--log-level",
            OLLAMA: "OLLAMA_DEBUG",
        },
    ),
    ForeignFlag(
        "",
        "each request has a line in the log, without its text",
        {
            VLLM: "--enable-log-requests --disable-log-requests --disable-uvicorn-access-log",
            SGLANG: "--log-requests --log-requests-level",
        },
    ),
    ForeignFlag(
        "--log-format json",
        "standard error has the log: redirect it to a file",
        {LLAMA: "--log-file --log-jsonl --log-disable", VLLM: "--log-config-file"},
    ),
    ForeignFlag(
        "--otlp-endpoint URL",
        "",
        {
            VLLM: "--otlp-traces-endpoint --collect-detailed-traces",
            SGLANG: "--enable-trace --otlp-traces-endpoint",
        },
    ),
    ForeignFlag(
        "",
        "the server runs no tools: its clients do",
        {
            LLAMA: "--tools --mcp-servers-config --agent",
            VLLM: "--tool-server",
            SGLANG: "--tool-server",
            VLLM_MLX: "--mcp-config",
        },
    ),
    ForeignFlag(
        "",
        "the page at / is always there",
        {LLAMA: "--webui --no-webui --ui --no-ui --path"},
    ),
)

HERE = "here it is `trouper {}`"
ENDS = "Ctrl-C ends a server, and the page at / unloads a model"
LOG = "standard error has the log, and the page at / the requests"
UPDATE = "`uv tool`, pipx or pip does that, as it installed trouper (packaging/README.md)"
# Commands of ollama and of LM Studio's `lms`.
FOREIGN_COMMANDS = {
    "pull": HERE.format("models pull"),
    "get": HERE.format("models pull"),
    "list": HERE.format("models ls"),
    "ls": HERE.format("models ls"),
    "show": HERE.format("models info"),
    "rm": HERE.format("models rm"),
    "ps": HERE.format("top"),
    "status": HERE.format("top"),
    "server": HERE.format("serve"),
    "load": HERE.format("serve"),
    "help": HERE.format("--help"),
    "version": HERE.format("--version"),
    "stop": ENDS,
    "unload": ENDS,
    "create": "a settings file has a table for each model, and system prompts are the client's",
    "cp": "`trouper serve --served-model-name NAME` gives a model another name",
    "import": "`trouper serve DIR` takes a directory where it is",
    "push": "nothing is uploaded here",
    "log": LOG,
    "logs": LOG,
    "config": HERE.format("serve --print-config"),
    "update": UPDATE,
    "upgrade": UPDATE,
    "uninstall": UPDATE,
}


def _names() -> Iterator[tuple[str, str, ForeignFlag]]:
    for row in FOREIGN_FLAGS:
        for server, names in row.names.items():
            yield from ((name, server, row) for name in names.split())


def of_others(name: str) -> str | None:
    """Return what a name is elsewhere and here; None for a name that no other server has."""
    rows = [(server, row) for each, server, row in _names() if each == name]
    if not rows:
        return None
    owners = " and ".join(dict.fromkeys(server for server, _ in rows))
    meanings = dict.fromkeys(row for _, row in rows)
    meaning = ", or ".join(f"here it is {row.meaning()}" for row in meanings if row.here)
    meaning = meaning or "; ".join(row.remark for row in meanings)
    return f"{name} is a flag of {owners}; {meaning}"


class NameOfAnother(click.UsageError):
    """A flag or a command of another server. The message is one line and names the remedy."""


def require_own(error: click.NoSuchOption, arguments: Sequence[str]) -> None:
    """Raise `NameOfAnother` for a flag of another server. click names only the first letter of a
    word such as -ngl, so the word is looked for in `arguments`."""
    words = (word.partition("=")[0] for word in arguments)
    typed = [word for word in words if word.startswith(error.option_name)]
    for name in (*typed, error.option_name):
        if meaning := of_others(name):
            raise NameOfAnother(meaning, error.ctx) from error
