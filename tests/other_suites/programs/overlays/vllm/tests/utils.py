"""In the place of vLLM's tests/utils.py: its server is `trouper serve`."""

from pathlib import Path
from unittest.mock import MagicMock

import anthropic
import openai
import served

MEANT = {"--max-model-len": "--context-length", "--api-key": "--api-key"}
"""Flags of vLLM's that have one here; the others choose how it computes."""
ROCM_EXTRA_ARGS = []
VLLM_PATH = Path(__file__).parent.parent
multi_gpu_only = requires_fp8 = MagicMock()


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args=(), **_):
        args = list(vllm_serve_args)
        names = args[args.index("--served-model-name") + 1] if "--served-model-name" in args else ""
        self.flags = ["--served-model-name", names or model]
        for theirs, ours in MEANT.items():
            if theirs in args:
                self.flags += [ours, args[args.index(theirs) + 1]]
        self.url_root  # noqa: B018

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def url_root(self):
        return served.serve(*self.flags)

    def url_for(self, *path):
        return "/".join((self.url_root, *path))

    def get_client(self, **options):
        return openai.OpenAI(**self._options(options, "v1"))

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(**self._options(options, "v1"))

    def get_client_anthropic(self, **options):
        return anthropic.Anthropic(**self._options(options))

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(**self._options(options))

    def _options(self, options, *path):
        of_all = {"timeout": 600, "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return of_all | {"base_url": self.url_for(*path)} | options
