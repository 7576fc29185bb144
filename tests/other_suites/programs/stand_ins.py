"""Stands in for packages that a suite imports and that are not here: modules whose names are all
mocks. Tests that need more than a name are left out."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class StandIn(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        mock = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, mock)
        return mock


class Finder(MetaPathFinder, Loader):
    """The last of all finders: what is there is not stood in for."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, fullname, _path, _target=None):
        if fullname.partition(".")[0] in self.packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def install(packages):
    sys.meta_path.append(Finder(frozenset(packages)))
