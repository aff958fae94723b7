"""OpenAI's completions: prompts as they are, without a chat template; and texts as tokens, as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.encode import Prompt
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import AnswerChange, Changes, completion_logprobs, whole
from hybrid.server.call import Call
from hybrid.server.chat import DONE, openai_error, stream_options, template_fields, usage_of
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.openai_messages import openai_messages
from hybrid.server.records import Digests
from hybrid.server.sampling import changed, openai_params, structured_of
from hybrid.server.service import Asked, Server, new_id


async def completions(server: Server, call: Call) -> None:
    """Answer `POST /v1/completions`."""
    await server.answer(call, read_completions)


def read_completions(server: Server, call: Call, fields: Fields, model: str | None) -> Asked:
    """Read what a body asks.

    Raises:
        HttpError: something cannot be used.
    """
    prompts = read_prompts(fields)
    structured = structured_of(fields)
    params = openai_params(fields, server.defaults, 16, "max_tokens")
    top = fields.integer("logprobs", 0, 100)
    more = {"logprobs": top, "structured": structured, "truncate_prompt_tokens": fields.take("truncate_prompt_tokens")}
    params = changed(params, more, fields)
    is_stream, options = fields.boolean("stream"), stream_options(fields)
    best = fields.integer("best_of", 1, 128)
    if best is not None and best != params.n:
        raise HttpError(400, "best_of must be n: answers are not ranked", "best_of", "unsupported_value")
    echo = fields.boolean("echo")
    if echo and (top is not None or len(prompts) > 1 or not isinstance(prompts[0], str)):
        raise HttpError(400, "echo is for one prompt of text, without logprobs", "echo", "unsupported_value")
    salt = fields.text("cache_salt") or ""
    fields.never(suffix="this server continues texts")
    fields.close()
    prefix = str(prompts[0]) if echo else ""
    writer = CompletionWriter(server, params, len(prompts), prefix, *options)
    return Asked(prompts, server.with_adapter(params, model), writer, is_stream, salt)


def read_prompts(fields: Fields) -> list[Prompt]:
    """The prompts of a body: a text, a list of token ids, or a list of these.

    Raises:
        HttpError: there is none, or one is neither.
    """
    given = fields.take("prompt")
    if isinstance(given, str) or is_ids(given):
        return [given]
    if not isinstance(given, list) or not given:
        raise fields.refuse("prompt", "a text, a list of token ids, or a list of these", given)
    for prompt in given:
        if not isinstance(prompt, str) and not is_ids(prompt):
            raise fields.refuse("prompt", "a text, a list of token ids, or a list of these", prompt)
    return given


def is_ids(value: Any) -> bool:
    """Tell whether a value is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class CompletionWriter:
    """Writes completions.

    Args:
        server: that answers.
        params: of the request.
        num_prompts: of the request; answer k of prompt p has the index p * n + k.
        prefix: before each answer.
        usage_at_end, usage_always: whether a stream ends with its usage, and whether each piece has it.
    """

    def __init__(
        self,
        server: Server,
        params: SamplingParams,
        num_prompts: int,
        prefix: str,
        usage_at_end: bool,
        usage_always: bool,
    ) -> None:
        self.id: str = new_id("cmpl-")
        self.parts: Digests | None = None
        self._params = params
        self._prefix = prefix
        self._usage_at_end = usage_at_end
        self._usage_always = usage_always
        self._changes = [Changes(params.n) for _ in range(num_prompts)]
        self._characters: dict[int, int] = {}
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": server.name}
        self._start = b"data: " + orjson.dumps(self._head)[:-1] + b","

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """The prefix, if there is one."""
        if not self._prefix:
            return b""
        choices = [self._choice(0, AnswerChange(k, self._prefix, [], None, None)) for k in range(self._params.n)]
        return self._event({"choices": choices})

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """What is new of each answer."""
        choices = [self._choice(at, change) for change in self._changes[at].of(output)]
        if not choices:
            return b""
        return self._event({"choices": choices} | ({"usage": usage_of([output])} if self._usage_always else {}))

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The usage, if it is asked for, and the end."""
        return (self._event({"choices": [], "usage": usage_of(outputs)}) if self._usage_at_end else b"") + DONE

    def failed(self, failure: HttpError) -> bytes:
        """The error, and the end."""
        return b"data: " + orjson.dumps(openai_error(failure)) + b"\n\n" + DONE

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answers and the usage."""
        choices = [
            self._choice(at, replace(change, text=self._prefix + change.text))
            for at, output in enumerate(outputs)
            for change in whole(output)
        ]
        return self._head | {"choices": choices, "usage": usage_of(outputs)}

    def _event(self, more: dict[str, Any]) -> bytes:
        return self._start + orjson.dumps(more)[1:] + b"\n\n"

    def _choice(self, at: int, change: AnswerChange) -> dict[str, Any]:
        index, top = at * self._params.n + change.index, self._params.logprobs
        logprobs = None
        if top is not None and change.logprobs is not None:
            offset = self._characters.get(index, 0)
            logprobs = completion_logprobs(change, top, offset)
            self._characters[index] = offset + sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": change.text, "logprobs": logprobs, "finish_reason": change.finish_reason}


async def tokenize(server: Server, call: Call) -> None:
    """Answer `POST /tokenize`: the token ids of a text, or of messages with the chat template."""

    def read(fields: Fields, model: str | None) -> tuple[Prompt, bool]:
        prompt: Prompt
        if "messages" in fields:
            messages = openai_messages(fields.array("messages"), "messages", server.template)
            prompt = {"messages": messages} | template_fields(fields, server.template)
            if (tools := fields.array("tools")) is not None:
                prompt["tools"] = tools
        else:
            text = fields.text("prompt")
            if text is None:
                raise fields.refuse("prompt", "a text; or give messages", None)
            prompt = text
        fields.only("add_special_tokens", True)
        with_texts = fields.boolean("return_token_strs")
        fields.close()
        return prompt, with_texts

    prompt, with_texts = await server.read(call, read)
    ids = await server.encode(call, prompt)
    found = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
    if with_texts:
        found["token_strs"] = await server.beside(call, lambda: [server.tokenizer.decode([token]) for token in ids])
    await call.respond(found)


async def detokenize(server: Server, call: Call) -> None:
    """Answer `POST /detokenize`: the text of token ids, of as many as the model takes."""
    vocab_size, most = server.engine.engine.model.config.vocab_size, server.max_model_len

    def read(fields: Fields, model: str | None) -> list[int]:
        tokens = fields.array("tokens") or []
        fields.close()
        if len(tokens) > most or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
            raise fields.refuse("tokens", f"a list of up to {most} token ids, from 0 to {vocab_size - 1}", tokens)
        return tokens

    tokens = await server.read(call, read)
    await call.respond({"prompt": await server.beside(call, lambda: server.tokenizer.decode(tokens))})
