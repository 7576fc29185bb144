"""The classes that SGLang's kits are mixed into: a test case for each of its mixins."""

import importlib
import unittest
from pathlib import Path

import openai
import served

KEY = "sk-none"


class OfServer(unittest.TestCase):
    model = served_model_name = "default"
    api_key = KEY

    @property
    def base_url(self):
        return served.serve()

    @property
    def client(self):
        return openai.Client(api_key=KEY, base_url=f"{self.base_url}/v1")


def test_cases():
    """Each mixin of each kit, under the mixin's name."""
    for path in sorted((Path(__file__).parent / "sglang/test/kits").glob("*_kit.py")):
        kit = importlib.import_module(f"sglang.test.kits.{path.stem}")
        for name, mixin in vars(kit).items():
            if name.endswith("Mixin") and mixin.__module__ == kit.__name__:
                yield name, type(name, (mixin, OfServer), {"__module__": __name__})


test_cases.__test__ = False
globals().update(test_cases())
