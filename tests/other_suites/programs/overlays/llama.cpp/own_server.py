"""Plugin in the place of llama.cpp's conftest.py: its server is `trouper serve`."""

from urllib.parse import urlsplit

import served
import utils

MEANT = {"n_ctx": "--context-length", "n_predict": "--default-max-tokens", "api_key": "--api-key"}
"""What its server is told and has a flag here."""


def start(self, timeout_seconds=0):
    flags = ["--served-model-name", self.model_alias] if self.model_alias else []
    for name, flag in MEANT.items():
        if (value := getattr(self, name)) is not None and value != -1:
            flags += [flag, str(value)]
    self.server_port = urlsplit(served.serve(*flags)).port


utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda _: None
