"""Run real SGLang on a CPU-only torch, without sgl-kernel, triton or torchvision.

    python launch_cpu.py <arguments of sglang.launch_server>

Packages that are compiled for GPUs only are stood in for by modules in which every attribute exists; the paths that
SGLang takes on a CPU never call them. SGLang spawns children that run this file again (as `__mp_main__`), so the
stand-ins are there, too.
"""

import importlib.machinery
import os
import sys
import types

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0")  # "1" would demand sgl-kernel's CPU operations
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # no compiler needed: penalties etc. run eagerly
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores are many times slower
os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")

import torch  # before the stand-ins, so that torch itself sees no triton

STANDINS = ("triton", "torchvision")


class AnyClass(type):
    """A class in which every attribute exists."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class AnyModule(types.ModuleType):
    """A module in which every attribute exists; can be called as a decorator."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__, self.__file__ = [], __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = AnyClass(name, (), {"__module__": self.__name__}) if name[:1].isupper() else stand_in(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class Loader:
    def create_module(self, spec):
        return stand_in(spec.name)

    def exec_module(self, module):
        """Nothing to run."""


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STANDINS:
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)
        return None


class TritonConfig:
    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **extra):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def stand_in(name):
    """The stand-in for a module, made once."""
    if name not in sys.modules:
        sys.modules[name] = AnyModule(name)
    return sys.modules[name]


def install_stand_ins():
    sys.meta_path.append(Finder())  # last, so that a package that is installed wins
    triton = stand_in("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv = lambda a, b: -(a // -b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
    triton.Config = TritonConfig
    stand_in("torchvision").__version__ = "0.0.0"
    # RotaryEmbedding imports this on a platform that it does not know; the native path never calls it
    stand_in("vllm")._custom_ops = stand_in("vllm._custom_ops")


def without_pinning(function):
    def wrapped(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapped


def do_without_cuda():
    """LoRA asks for pinned memory without a condition, and the capture of routed experts for CUDA's runtime."""
    for name in ("tensor", "zeros", "arange", "empty", "ones", "full"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0, cudaGetErrorString=str
    )
    torch.cuda.cudart = lambda: runtime


install_stand_ins()
if not torch.cuda.is_available():
    do_without_cuda()

if __name__ == "__main__":
    import runpy

    sys.argv = ["sglang.launch_server", *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
