"""vLLM's RL routes over a scripted model."""

from aiohttp import web

from headway.testing.scripted_engine import ScriptedEngine


def routes(engine: ScriptedEngine) -> list[web.RouteDef]:
    return []
