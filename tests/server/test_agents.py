"""A model that thinks and calls tools, over HTTP, and the libraries that people write agents with: tools are called,
results come back, streams are whole answers. The libraries' tests run where they are installed (`make clients`)."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hybrid.prompts.cut_calls import whole_part
from support.scripted import Script, call_text
from support.served import Poster, events, served

ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
ASKED = [{"role": "user", "content": "What is 3 + 4?"}]
CALL = "I add them.\n</think>\n\n" + call_text("add", a=3, b=4)
LAST = "It is known.\n</think>\n\nThe sum is 7."


@pytest.fixture(scope="module")
def script(tiny: Any) -> Iterator[tuple[Script, Poster]]:
    script = Script(tiny)
    with served(script.engine) as (url, _):
        yield script, Poster(url)


def test_chats_of_a_model_that_thinks_and_calls(script: tuple[Script, Poster]) -> None:
    model, post = script
    tools = [{"type": "function", "function": ADD}]
    settings: dict[str, Any] = {"messages": ASKED, "tools": tools, "max_tokens": 200}
    model.says(CALL, CALL)
    choice = post.chat(**settings).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "I add them."
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 3, "b": 4})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(post.chat(**settings, stream=True))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I add them."
    (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["function"] == call["function"]
    model.says(LAST)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    last = post.chat(**settings | {"messages": [*ASKED, message, result]}).json()["choices"][0]
    assert last["message"]["content"] == "The sum is 7." and last["finish_reason"] == "stop"


def test_messages_and_responses_of_a_model_that_thinks_and_calls(script: tuple[Script, Poster]) -> None:
    model, post = script
    tool = {"name": "add", "input_schema": ADD["parameters"]}
    model.says(CALL, CALL)
    body = {"messages": ASKED, "tools": [tool], "max_tokens": 200}
    answer = post("/v1/messages", **body).json()
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert answer["content"][1]["input"] == {"a": 3, "b": 4}
    streamed = events(post("/v1/messages", **body, stream=True))
    texts = [one["delta"].get("partial_json", "") for one in streamed if one["type"] == "content_block_delta"]
    assert json.loads("".join(texts)) == {"a": 3, "b": 4}
    model.says(LAST)
    result = {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": "7"}
    turns = [*ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert post("/v1/messages", **body | {"messages": turns}).json()["content"][-1]["text"] == "The sum is 7."
    model.says(CALL)
    found = post("/v1/responses", input="add", tools=[{"type": "function"} | ADD], max_output_tokens=200).json()
    assert [item["type"] for item in found["output"]] == ["reasoning", "function_call"]
    assert json.loads(found["output"][1]["arguments"]) == {"a": 3, "b": 4}


def test_a_call_that_must_be_made_may_have_texts(script: tuple[Script, Poster]) -> None:
    model, post = script
    note = {"name": "note", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
    text = "two\n\nlines, 1 < 2"
    model.says("</think>\n\n" + call_text("note", text=text))
    tools = [{"type": "function", "function": note}]
    choice = post.chat(tools=tools, tool_choice="required", max_tokens=120).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and json.loads(call["function"]["arguments"]) == {"text": text}


def test_a_call_that_was_cut_has_what_was_written_in_each_api(script: tuple[Script, Poster]) -> None:
    model, post = script
    note = {"name": "note", "parameters": {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}}
    text = "</think>\n\n" + call_text("note", n=12, text="two\nlines of it")
    full = '{"n":12,"text":"two\\nlines of it"}'
    size = len(model.tokens(text))
    written: list[str] = []
    for length in range(2, size + 2, 5):
        body: dict[str, Any] = {"tools": [{"type": "function", "function": note}], "max_tokens": length}
        model.says(text, text)
        choice = post.chat(**body).json()["choices"][0]
        chunks = [chunk["choices"][0] for chunk in events(post.chat(**body, stream=True))]
        message = {"role": "assistant", "content": "".join(one["delta"].get("content") or "" for one in chunks)}
        calls = [call["function"] for one in chunks for call in one["delta"].get("tool_calls", [])]
        assert calls == [call["function"] for call in choice["message"].get("tool_calls", [])]
        assert message["content"] == (choice["message"]["content"] or "")
        assert chunks[-1]["finish_reason"] == choice["finish_reason"] == ("length" if length <= size else "tool_calls")
        written += [call["arguments"] for call in calls]

        tool = {"name": "note", "input_schema": note["parameters"]}
        body = {"messages": ASKED, "tools": [tool], "max_tokens": length}
        model.says(text, text)
        blocks = post("/v1/messages", **body).json()["content"]
        found: list[dict[str, Any]] = []
        for event in events(post("/v1/messages", **body, stream=True)):
            if event["type"] == "content_block_start":
                found.append(event["content_block"] | {"pieces": ""})
            elif event["type"] == "content_block_delta":
                found[-1]["pieces"] += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        assert [block["type"] for block in found] == [block["type"] for block in blocks]
        made = [block for block in blocks if block["type"] == "tool_use"]
        assert [block["pieces"] for block in found if "input" in block] == [call["arguments"] for call in calls]
        assert all(
            whole_part(call["arguments"]).items() <= one["input"].items() for call, one in zip(calls, made, strict=True)
        )

        body = {"input": "note", "tools": [{"type": "function"} | note], "max_output_tokens": length}
        model.says(text, text)
        items = post("/v1/responses", **body).json()["output"]
        last = events(post("/v1/responses", **body, stream=True))[-1]["response"]["output"]
        ids = "id", "call_id"
        without = [
            [{key: value for key, value in one.items() if key not in ids} for one in made] for made in (items, last)
        ]
        assert without[0] == without[1]
        assert [one["arguments"] for one in items if "arguments" in one] == [call["arguments"] for call in calls]
    assert written[-1] == full and all(full.startswith(one) for one in written)
    assert len({*written}) > 3


def test_reasoning_comes_back_with_the_items_of_a_response(script: tuple[Script, Poster]) -> None:
    model, post = script
    tools = [{"type": "function"} | ADD]
    model.says(CALL, LAST)
    items = post("/v1/responses", input="add", tools=tools, max_output_tokens=200).json()["output"]
    result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "7"}
    turns = [{"role": "user", "content": "add"}, *items, result]
    whole = post("/v1/responses", input=turns, tools=tools, max_output_tokens=200).json()
    assert whole["output"][-1]["content"][0]["text"] == "The sum is 7."
    without = post("/v1/responses", input=[turns[0], *turns[2:]], tools=tools, max_output_tokens=1).json()
    assert whole["usage"]["input_tokens"] > without["usage"]["input_tokens"]  # the template has read it


def test_thinking_is_turned_off_in_each_api(script: tuple[Script, Poster]) -> None:
    model, post = script
    said = "The sum is 7."
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": ASKED, "reasoning_effort": "none"}),
        ("/v1/responses", {"input": ASKED, "reasoning": {"effort": "none"}}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 20, "thinking": {"type": "disabled"}}),
    ]
    for path, body in ways:
        model.says(said)  # without the mark that ends thinking: with thinking on, all of it would be reasoning
        answer = post(path, **body).json()
        texts = json.dumps(answer.get("choices") or answer.get("output") or answer["content"])
        assert said in texts and "reasoning" not in texts and "thinking" not in texts
    counts = [
        post("/v1/messages/count_tokens", messages=ASKED, thinking={"type": kind}).json()["input_tokens"]
        for kind in ("disabled", "adaptive")
    ]
    assert counts[0] > counts[1]  # the mark that ends thinking
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    refused = post.chat(**both)
    assert refused.status_code == 400 and "chat_template_kwargs.enable_thinking" in refused.json()["error"]["message"]


def test_thinking_may_be_left_out_of_a_message(script: tuple[Script, Poster]) -> None:
    model, post = script
    body = {"messages": ASKED, "max_tokens": 60, "thinking": {"type": "adaptive", "display": "omitted"}}
    model.says(LAST, LAST)
    blocks = post("/v1/messages", **body).json()["content"]
    assert [block.get("thinking", block.get("text")) for block in blocks] == ["", "The sum is 7."]
    streamed = [one["delta"] for one in events(post("/v1/messages", **body, stream=True)) if "delta" in one]
    assert not any("thinking" in delta for delta in streamed)


def test_without_parallel_calls_an_answer_has_one(script: tuple[Script, Poster]) -> None:
    model, post = script
    chat = {"tools": [{"type": "function", "function": ADD}], "max_tokens": 200}
    tool = {"name": "add", "input_schema": ADD["parameters"]}
    for stream in (False, True):
        for is_parallel in (True, False):
            model.says(CALL + call_text("add", a=5, b=6), CALL + call_text("add", a=5, b=6))
            answer = post.chat(**chat, parallel_tool_calls=is_parallel, stream=stream)
            choices = [one["choices"][0] for one in (events(answer) if stream else [answer.json()])]
            parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            assert sum(len(part.get("tool_calls", [])) for part in parts) == 1 + is_parallel
            choice = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
            body = {"messages": ASKED, "tools": [tool], "tool_choice": choice, "max_tokens": 200}
            answer = post("/v1/messages", **body, stream=stream)
            assert answer.text.count('"type":"tool_use"') == 1 + is_parallel


def test_the_first_event_of_a_stream_comes_before_any_token(
    script: tuple[Script, Poster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of each answer waits until the client has had an event."""
    _, post = script
    may_end, waited, choose = threading.Event(), list[bool](), Script.__call__

    def held(self: Script, answer: list[int], logits: Any) -> Any:
        waited.append(may_end.wait(60))
        return choose(self, answer, logits)

    monkeypatch.setattr(Script, "__call__", held)
    chat = {"model": "tiny", "messages": ASKED, "max_tokens": 4, "stream": True}
    response = {"model": "tiny", "input": "What is 3 + 4?", "max_output_tokens": 4, "stream": True}
    for path, body in (("chat/completions", chat), ("messages", chat), ("responses", response)):
        may_end.clear()
        with httpx.stream("POST", f"{post.address}/v1/{path}", json=body, timeout=90) as events_of:
            lines = events_of.iter_lines()
            assert next(lines)
            may_end.set()
            assert len([*lines]) > 2
    assert waited and all(waited)


def test_the_small_model_answers_a_loop_of_tools_in_each_api(post_tiny: Poster) -> None:
    """A grammar makes its calls: it was not trained to make any. Each turn has the one before in its prompt."""
    bounded = ADD | {"parameters": ADD["parameters"] | {"properties": {name: {"enum": [3, 4]} for name in "ab"}}}
    tools = [{"type": "function", "function": bounded}]
    chat: dict[str, Any] = {"messages": ASKED, "tools": tools, "max_tokens": 60}
    first = post_tiny.chat(**chat, tool_choice="required").json()
    assert "choices" in first, first
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
    last = post_tiny.chat(**chat | {"messages": [*ASKED, message, result]}).json()
    assert last["choices"][0]["message"]["content"] and "tool_calls" not in last["choices"][0]["message"]
    assert last["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 10
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] // 16 * 16

    tool = {"name": "add", "input_schema": bounded["parameters"]}
    body: dict[str, Any] = {"messages": ASKED, "tools": [tool], "max_tokens": 60}
    content = post_tiny("/v1/messages", **body, tool_choice={"type": "any"}).json()["content"]
    result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "7"}
    turns = [*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert post_tiny("/v1/messages", **body | {"messages": turns}).json()["content"][0]["text"]

    settings = {"tools": [{"type": "function"} | bounded], "max_output_tokens": 60}
    (call,) = post_tiny("/v1/responses", input=ASKED, **settings, tool_choice="required").json()["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    assert post_tiny("/v1/responses", input=[*ASKED, call, result], **settings).json()["output"][0]["content"][0][
        "text"
    ]


def test_the_small_model_thinks_where_it_is_asked_to(post_tiny: Poster) -> None:
    on = post_tiny.chat(chat_template_kwargs={"enable_thinking": True}).json()["choices"][0]["message"]
    off = post_tiny.chat(reasoning_effort="none").json()["choices"][0]["message"]
    assert on["reasoning_content"] and not on["content"] and off["content"] and "reasoning_content" not in off


# Libraries


def test_a_client_of_litellm(script: tuple[Script, Poster]) -> None:
    litellm = pytest.importorskip("litellm")
    model, post = script
    for name, base in (("openai/tiny", f"{post.address}/v1"), ("anthropic/tiny", post.address)):
        settings: dict[str, Any] = {"model": name, "api_base": base, "api_key": "none", "max_tokens": 200}
        tools = [{"type": "function", "function": ADD}]
        model.says(CALL, LAST, LAST)
        message = litellm.completion(messages=ASKED, tools=tools, **settings).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3, "b": 4})
        result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
        turns = [*ASKED, message.model_dump(exclude_none=True), result]
        whole = litellm.completion(messages=turns, tools=tools, **settings).choices[0].message.content
        stream = litellm.completion(messages=turns, tools=tools, stream=True, **settings)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole == "The sum is 7."
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(messages=ASKED, temperature=-1, **settings)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    settings |= {"model": "openai/tiny", "api_base": f"{post.address}/v1"}
    model.says("</think>\n\n")
    text = litellm.completion(messages=ASKED, response_format=form, **settings).choices[0].message.content
    assert json.loads(text)["a"] in (1, 2)


def test_an_agent_of_openai(script: tuple[Script, Poster]) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model, post = script
    added: list[int] = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        added.append(a + b)
        return a + b

    async def run(kind: Any) -> None:
        client = openai.AsyncOpenAI(base_url=f"{post.address}/v1", api_key="none", max_retries=0)
        agent = agents.Agent(name="adder", tools=[add], model=kind(model="tiny", openai_client=client))
        model.says(CALL, LAST)
        assert (await agents.Runner.run(agent, "What is 3 + 4?")).final_output == "The sum is 7."
        model.says(CALL, LAST)
        streamed = agents.Runner.run_streamed(agent, "What is 3 + 4?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == "The sum is 7." and "raw_response_event" in kinds

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        asyncio.run(run(kind))
    assert added == [7] * 4


def test_an_agent_of_pydantic(script: tuple[Script, Poster]) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    pydantic = pytest.importorskip("pydantic")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model, post = script
    chat = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{post.address}/v1", api_key="none"))
    agent = pydantic_ai.Agent(chat)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model.says(CALL, LAST)
    assert agent.run_sync("What is 3 + 4?").output == "The sum is 7."
    pair = pydantic.create_model("Pair", a=(int, ...), b=(int, ...))
    model.says("</think>\n\n" + call_text("final_result", a=5, b=6))
    assert pydantic_ai.Agent(chat, output_type=pair).run_sync("Say a pair.").output == pair(a=5, b=6)
    model.says("</think>\n\n")
    native = pydantic_ai.Agent(chat, output_type=pydantic_ai.NativeOutput(pair))
    assert isinstance(native.run_sync("Say a pair.").output, pair)


def test_an_agent_of_smolagents(script: tuple[Script, Poster]) -> None:
    smolagents = pytest.importorskip("smolagents")
    model, post = script

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    chat = smolagents.OpenAIModel(model_id="tiny", api_base=f"{post.address}/v1", api_key="none")
    agent = smolagents.ToolCallingAgent(tools=[add], model=chat, verbosity_level=0, max_steps=2)
    model.says(CALL, "</think>\n\n" + call_text("final_answer", answer="7"))
    assert agent.run("What is 3 + 4?") == "7"
