"""The engines that the contract suite runs against: the built-in one always, real SGLang where its Python is given.

HEADWAY_SGLANG_PYTHON is the Python of an environment made by tools/sglang_cpu/setup.sh; `make test-sglang` sets it.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engine_client import Engine


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `a` and `b`: same shape, other weights."""
    from services.inference.tiny_model import save_tiny_model  # torch, only where it is needed

    root = tmp_path_factory.mktemp("models")
    save_tiny_model(root / "a", seed=0)
    save_tiny_model(root / "b", seed=1)
    return root


SGLANG = pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(400)])


@pytest.fixture(scope="session", params=["builtin", *([SGLANG] if "HEADWAY_SGLANG_PYTHON" in os.environ else [])])
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[str, str]]:
    """(kind, url) of an engine that serves model `a`."""
    from engine_servers import serve_builtin, serve_sglang

    start = serve_builtin if request.param == "builtin" else serve_sglang
    with start(models) as url:
        yield request.param, url


@pytest.fixture(scope="session", params=["builtin", *([SGLANG] if "HEADWAY_SGLANG_PYTHON" in os.environ else [])])
def lora_server(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[str, str]]:
    """(kind, url) of an engine that serves model `a`, and takes adapters."""
    from engine_servers import serve_builtin, serve_sglang

    if request.param == "builtin":
        with serve_builtin(models) as url:
            yield request.param, url
    else:
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        flags = ["--enable-lora", "--max-lora-rank", "4", "--lora-backend", "torch_native"]
        with serve_sglang(models, *flags, "--lora-target-modules", *modules) as url:
            yield request.param, url


@pytest.fixture
async def engine(server: tuple[str, str], models: Path) -> AsyncIterator[Engine]:
    """The engine, idle and with the weights of model `a`, whatever the test before has done."""
    kind, url = server
    async with Engine.open(kind, url, models) as engine:
        yield engine
        await engine.restore()
