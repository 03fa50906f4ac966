"""Lets SGLang start where there is no GPU: its kernels and torchvision are imported, and never called, on the CPU path.

`setup.sh` puts this file into the venv of the real SGLang, which loads it at every start of Python. A stubbed package
gives a stand-in for every name asked of it; calling one fails loudly. To the question whether it is installed, the
answer is no.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STUBBED = ("sgl_kernel", "torchvision")


class _AnyName(type):
    """Any public attribute of a stand-in is the stand-in; it can stand in annotations and in empty loops."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return other

    __ror__ = __or__

    def __getitem__(cls, item):
        return cls


class StandIn(metaclass=_AnyName):
    """What a stubbed package holds under every name."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __call__(self, *args, **kwargs):
        raise NotImplementedError("this needs a GPU, or images")


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0+stub"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STUBBED or _asked_whether_installed():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def _asked_whether_installed() -> bool:
    """Whether `importlib.util.find_spec` asks, and not an import."""
    frame = sys._getframe(2)
    while frame is not None and "importlib._bootstrap" in frame.f_code.co_filename:
        frame = frame.f_back
    asker = frame.f_code.co_filename if frame is not None else ""
    return asker.endswith("importlib/util.py") or "importlib.util" in asker


sys.meta_path.append(_Finder())
