"""The routes that agents' clients call: OpenAI's under `/v1`, Anthropic's `/v1/messages`, and both under
`/sessions/{name}/v1`, where the name is a session's id, or its key where a client sends none.

Errors have the form that each client expects. The routes are not in the OpenAPI document: their form is OpenAI's and
Anthropic's.
"""

import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from headway.errors import HeadwayError, NotFound
from headway.gateway import anthropic_replies, openai_replies
from headway.gateway.anthropic_requests import CountRequest, MessagesRequest
from headway.gateway.calls import Answer
from headway.gateway.errors import Unsupported
from headway.gateway.gateway import Gateway
from headway.gateway.openai_requests import ChatRequest, CompletionRequest, Generating
from headway.gateway.sampling import Asked
from headway.gateway.session import Session
from headway.gateway.wire import parse
from headway.workflow.errors import PromptTooLong
from services.rollout_controller.gateway_http import body_of, json_response, key_of, stream, unless_gone

log = logging.getLogger(__name__)
CLIENT_GONE = 499
"""Never seen by anyone: the client has gone."""
MODEL = "policy"
"""The name of the one model; any other name means it too."""
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
PREFIXES = ("/v1", "/sessions/{name}/v1")


def chat_router(gateway: Gateway) -> APIRouter:
    """The routes of both APIs."""
    router = APIRouter(include_in_schema=False)
    openai, anthropic = OpenAIApi(gateway), AnthropicApi(gateway)
    for prefix in PREFIXES:
        part = APIRouter(prefix=prefix, route_class=OpenAIRoute)
        part.add_api_route("/chat/completions", openai.chat, methods=["POST"])
        part.add_api_route("/completions", openai.completion, methods=["POST"])
        part.add_api_route("/models", openai.models, methods=["GET"])
        part.add_api_route("/models/{model:path}", openai.model, methods=["GET"])
        other = APIRouter(prefix=prefix, route_class=AnthropicRoute)
        other.add_api_route("/messages", anthropic.messages, methods=["POST"])
        other.add_api_route("/messages/count_tokens", anthropic.count_tokens, methods=["POST"])
        router.include_router(part)
        router.include_router(other)
    return router


class SessionApi:
    """Finds the session of a call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def session(self, request: Request) -> Session:
        return self._gateway.sessions.find(key_of(request), request.path_params.get("name"))


class OpenAIApi(SessionApi):
    """What the `openai` client calls."""

    async def chat(self, request: Request) -> Response:
        session, id = self.session(request), f"chatcmpl-{secrets.token_hex(12)}"
        body: ChatRequest = parse(ChatRequest, await body_of(request))
        chat = body.chat()
        work = session.answer(chat, id, body.n or 1)
        text_of = session.token_text if body.logprobs else None
        whole = partial(openai_replies.chat_completion, id, body.model, text_of=text_of)
        chunks = partial(
            openai_replies.chat_chunks, id, body.model, text_of=text_of, includes_usage=body.includes_usage
        )
        return await _answer(request, body, work, whole, chunks, _told(session, chat.asked))

    async def completion(self, request: Request) -> Response:
        session, id = self.session(request), f"cmpl-{secrets.token_hex(12)}"
        body: CompletionRequest = parse(CompletionRequest, await body_of(request))
        asked = body.asked(body.max_tokens)
        work = session.complete(body.text(), asked, id, body.n or 1)
        text_of = session.token_text if body.logprobs is not None else None
        whole = partial(openai_replies.completion, id, body.model, text_of=text_of)
        chunks = partial(
            openai_replies.completion_chunks, id, body.model, text_of=text_of, includes_usage=body.includes_usage
        )
        return await _answer(request, body, work, whole, chunks, _told(session, asked))

    async def models(self, request: Request) -> Response:
        self.session(request)
        return json_response(openai_replies.models([MODEL]))

    async def model(self, request: Request) -> Response:
        self.session(request)
        if (name := request.path_params["model"]) != MODEL:
            raise NotFound(f"the model {name!r} does not exist; there is {MODEL!r}")
        return json_response(openai_replies.model(MODEL))


class AnthropicApi(SessionApi):
    """What the `anthropic` client calls."""

    async def messages(self, request: Request) -> Response:
        session, id = self.session(request), f"msg_{secrets.token_hex(12)}"
        body: MessagesRequest = parse(MessagesRequest, await body_of(request))
        asked = body.asked()
        work, headers = session.answer(body.chat(asked), id), _told(session, asked)
        if body.stream:
            return await stream(request, work, partial(_anthropic_frames, id, body.model), _anthropic_error, headers)
        answers = await unless_gone(request, work)
        return json_response(anthropic_replies.message(id, body.model, answers[0]), headers=headers)

    async def count_tokens(self, request: Request) -> Response:
        session = self.session(request)
        body: CountRequest = parse(CountRequest, await body_of(request))
        return json_response({"input_tokens": session.count_tokens(body.chat())})


async def _answer(
    request: Request,
    body: Generating,
    work: Coroutine[Any, Any, list[Answer]],
    whole: Callable[[list[Answer]], Any],
    chunks: Callable[[list[Answer]], Iterator[Any]],
    headers: dict[str, str],
) -> Response:
    """An OpenAI answer, in one piece or as a stream."""
    if body.stream:
        return await stream(request, work, lambda answers: _openai_frames(chunks(answers)), _openai_error, headers)
    return json_response(whole(await unless_gone(request, work)), headers=headers)


def _told(session: Session, asked: Asked) -> dict[str, str]:
    """Headers that tell which of the client's parameters did not count."""
    overridden = session.overridden(asked)
    return {"headway-overridden": ", ".join(f"{k}={v}" for k, v in overridden.items())} if overridden else {}


# ---- streams and errors in each client's form


def _openai_frames(chunks: Iterable[Any]) -> Iterator[bytes]:
    for chunk in chunks:
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _anthropic_frames(id: str, model: str, answers: Sequence[Answer]) -> Iterator[bytes]:
    for event in anthropic_replies.events(id, model, answers[0]):
        yield _anthropic_frame(event)


def _anthropic_frame(event: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def _openai_body(error: HeadwayError) -> dict[str, Any]:
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    code = "invalid_api_key" if error.http_status == 401 else code
    parameter = error.parameter if isinstance(error, Unsupported) else None
    return openai_replies.error(error.http_status, str(error), parameter, code)


def _anthropic_body(error: HeadwayError) -> dict[str, Any]:
    return anthropic_replies.error(error.http_status, str(error))


def _openai_error(error: HeadwayError) -> bytes:
    return b"data: " + orjson.dumps(_openai_body(error)) + b"\n\n"


def _anthropic_error(error: HeadwayError) -> bytes:
    return _anthropic_frame(_anthropic_body(error))


class OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's form."""

    def get_route_handler(self) -> Handler:
        return _shaped(super().get_route_handler(), _openai_body)


class AnthropicRoute(APIRoute):
    """A route whose errors have Anthropic's form."""

    def get_route_handler(self) -> Handler:
        return _shaped(super().get_route_handler(), _anthropic_body)


def _shaped(handler: Handler, body_of_error: Callable[[HeadwayError], Any]) -> Handler:
    async def handled(request: Request) -> Response:
        try:
            return await handler(request)
        except HeadwayError as error:
            return json_response(body_of_error(error), error.http_status)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)

    return handled
