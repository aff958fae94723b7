"""The paths of the server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.routing import Route, Router

from hybrid.server.adapters import load_lora_adapter, unload_lora_adapter
from hybrid.server.call import Call, Receive, Scope, Send
from hybrid.server.chat import chat_completions, openai_error
from hybrid.server.completions import completions, detokenize, tokenize
from hybrid.server.errors import HttpError, failure_of
from hybrid.server.messages import anthropic_error, count_tokens, messages
from hybrid.server.metrics import metrics
from hybrid.server.observing import explain, live, page, tree
from hybrid.server.responses import responses
from hybrid.server.service import Server

log: logging.Logger = logging.getLogger(__name__)

Handler = Callable[[Server, Call], Awaitable[None]]
ErrorForm = Callable[[HttpError], dict[str, Any]]


class Endpoint:
    """An ASGI application for one path.

    Args:
        server: that answers.
        handle: answers a call.
        form: of errors, in the path's API.
        methods: that the path takes; none: any.
        is_open: needs no key.
    """

    def __init__(
        self,
        server: Server,
        handle: Handler,
        form: ErrorForm = openai_error,
        *,
        methods: tuple[str, ...] = (),
        is_open: bool = False,
    ) -> None:
        self._server = server
        self._handle = handle
        self._form = form
        self._methods = methods
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        call = Call(scope, receive, send)
        try:
            if self._methods and scope["method"] not in self._methods:  # a route's own refusal would not be JSON
                methods = ", ".join(self._methods)
                raise HttpError(
                    405, f"{call.path} takes {methods}", code="method_not_allowed", headers={"allow": methods}
                )
            if not self._is_open:
                self._server.tenants.check_origin(call.headers)
                call.tenant = self._server.tenants.of(call.headers)
            await self._handle(self._server, call)
        except Exception as error:
            failure = failure_of(error)
            if failure.status == 500:
                log.exception("%s failed", call.path)
            if call.has_begun:  # what was sent cannot be taken back: the connection ends early, which clients see
                raise
            await call.respond(self._form(failure), failure.status, failure.headers)


async def models(server: Server, call: Call) -> None:
    """Answer `GET /v1/models`."""
    names = [server.name, *server.engine.engine.adapters]
    await call.respond({"object": "list", "data": [_model(server, call, name) for name in names]})


async def model(server: Server, call: Call) -> None:
    """Answer `GET /v1/models/{name}`."""
    name = call.path_params["name"]
    server.check_model(name)
    await call.respond(_model(server, call, name))


def _model(server: Server, call: Call, name: str) -> dict[str, Any]:
    """The entry of the model or of an adapter, with vLLM's `root`, from where it was loaded, for who sees all, and
    `parent`."""
    found: dict[str, Any] = {"id": name, "object": "model", "created": server.created, "owned_by": "hybrid"}
    engine = server.engine.engine
    adapter = engine.adapters.get(name)
    place = engine.loaded.name if adapter is None else str(adapter.path)
    found |= {"root": place if call.tenant.sees_all else name, "parent": None if adapter is None else server.name}
    return found | {"type": "model", "display_name": name, "max_model_len": server.max_model_len}


async def nothing(server: Server, call: Call) -> None:
    """Refuse a path that there is not."""
    raise HttpError(
        404, f"there is no {call.path!r:.100} here; docs/server.md lists what there is", code="unknown_path"
    )


async def health(server: Server, call: Call) -> None:
    """Answer `GET /health`: 503 where the engine has ended."""
    await _answer(call, not server.engine.has_ended, "the engine has ended")


async def ready(server: Server, call: Call) -> None:
    """Answer `GET /ready`: 503 where no request is taken."""
    await _answer(call, server.engine.is_running, "no request is taken: the server is ending")


async def _answer(call: Call, is_well: bool, otherwise: str) -> None:
    await call.respond({"status": "ok"} if is_well else {"status": otherwise}, 200 if is_well else 503)


def make_app(server: Server) -> Any:
    """The ASGI application of a server."""

    def post(path: str, handle: Handler, form: ErrorForm = openai_error) -> Route:
        return Route(path, Endpoint(server, handle, form, methods=("POST",)))

    def get(path: str, handle: Handler, *, is_open: bool = False) -> Route:
        return Route(path, Endpoint(server, handle, methods=("GET", "HEAD"), is_open=is_open))

    changes = {"/v1/load_lora_adapter": load_lora_adapter, "/v1/unload_lora_adapter": unload_lora_adapter}
    return Router(  # what a whole application has around it costs something for each token
        default=Endpoint(server, nothing, is_open=True),
        routes=[
            get("/health", health, is_open=True),
            get("/ready", ready, is_open=True),
            get("/v1/models", models),
            get("/v1/models/{name:path}", model),
            post("/v1/chat/completions", chat_completions),
            post("/v1/completions", completions),
            post("/v1/responses", responses),
            post("/v1/messages", messages, anthropic_error),
            post("/v1/messages/count_tokens", count_tokens, anthropic_error),
            post("/tokenize", tokenize),
            post("/detokenize", detokenize),
            get("/metrics", metrics),
            get("/explain/{id}", explain),
            get("/", page, is_open=True),
            get("/live", live),
            get("/tree", tree),
            *(post(path, handle) for path, handle in changes.items() if server.adapter_folder is not None),
        ],
    )
