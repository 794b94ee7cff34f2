"""POST /tokenize and /detokenize, GET /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tidemill.api.engine_client import EngineClient
from tidemill.api.errors import APIError, unsupported
from tidemill.api.http import json_response, read_body
from tidemill.api.openai import protocol
from tidemill.api.openai.generation import require_model, require_ready
from tidemill.wire.messages import (
    DetokenizeIds,
    TokenizeChat,
    TokenizeText,
    bytes_to_ids,
    ids_to_bytes,
)


async def tokenize(request: Request) -> Response:
    client: EngineClient = request.app.state.client
    body = protocol.decode(await read_body(request), protocol.TokenizeRequest)
    require_model(client, body.model)
    ready = require_ready(client)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", "prompt")
    if body.messages is not None and body.add_special_tokens:
        raise unsupported("add_special_tokens", " with messages: the template adds them")
    call: TokenizeText | TokenizeChat
    if body.messages is not None:
        call = TokenizeChat(
            call=client.new_id(),
            worker=client.worker,
            messages=protocol.plain_messages(body.messages),
            template_kwargs=body.chat_template_kwargs or {},
            add_generation_prompt=protocol.adds_generation_prompt(body),
            continue_final_message=body.continue_final_message,
            want_strings=body.return_token_strs,
        )
    else:
        call = TokenizeText(
            call=client.new_id(),
            worker=client.worker,
            texts=[body.prompt or ""],
            add_special_tokens=body.add_special_tokens is not False,
            want_strings=body.return_token_strs,
        )
    answer = await client.ask(call)
    if answer.error is not None:
        raise APIError.of(answer.error)
    ids = bytes_to_ids(answer.prompts[0]).tolist()
    made: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": ready.max_model_len,
        "tokens": ids,
        "token_strs": answer.strings[0] if answer.strings is not None else None,
    }
    return json_response(made)


async def detokenize(request: Request) -> Response:
    client: EngineClient = request.app.state.client
    body = protocol.decode(await read_body(request), protocol.DetokenizeRequest)
    require_model(client, body.model)
    require_ready(client)
    if any(not 0 <= token < 2**31 for token in body.tokens):
        raise APIError(400, "token ids must be between 0 and 2147483647", "tokens")
    answer = await client.ask(
        DetokenizeIds(call=client.new_id(), worker=client.worker, ids=ids_to_bytes(body.tokens))
    )
    if answer.error is not None:
        raise APIError.of(answer.error)
    return json_response({"prompt": answer.text})


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(request.app.state.client)]})


async def get_model(request: Request) -> Response:
    client: EngineClient = request.app.state.client
    require_model(client, request.path_params["model"])
    return json_response(_model(client))


def _model(client: EngineClient) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": client.config.model_name,
        "object": "model",
        "created": client.started,
        "owned_by": "tidemill",
    }
    if client.ready is not None:
        made["max_model_len"] = client.ready.max_model_len
    return made
