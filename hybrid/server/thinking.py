"""Thinking that a client turns on or off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.answer_parser import THINKING
from hybrid.prompts.thinking import Thinking
from hybrid.server.errors import HttpError


def set_thinking(
    prompt: dict[str, Any], params: SamplingParams, thinking: Thinking, name: str, is_on: bool
) -> SamplingParams:
    """Turn thinking on or off in a prompt.

    Args:
        prompt: with the options of the chat template, to which its variable is added.
        params: of the request.
        thinking: what the template does about it.
        name: of the field that asks for it.
        is_on: whether the model is to think.

    Returns:
        The parameters. Where a template has no variable for it, they exclude the mark that a model would begin with.

    Raises:
        HttpError: the template cannot do it, or its variable is given with another value.
    """
    if thinking.switch is not None:
        variables = prompt.get("chat_template_kwargs") or {}
        if variables.get(thinking.switch, is_on) is not is_on:
            text = f"{name} contradicts chat_template_kwargs.{thinking.switch}; leave one of them out"
            raise HttpError(400, text, name, "invalid_value")
        prompt["chat_template_kwargs"] = variables | {thinking.switch: is_on}
    elif is_on and not thinking.is_always:
        raise HttpError(400, f"{name}: this model's chat template cannot turn it on", name, "unsupported_parameter")
    elif not is_on and thinking.is_always:
        text = f"{name}: this model always thinks: its chat template cannot turn it off; leave it out"
        raise HttpError(400, text, name, "unsupported_value")
    elif not is_on and thinking.is_marked:
        return replace(params, bad_words=(*params.bad_words, THINKING[0]))
    return params
