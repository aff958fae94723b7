"""The router for replicas of vLLM, without any: which prompts it knows, and what it promises."""

from __future__ import annotations

import asyncio
from itertools import count
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from hybrid.events import Change
from hybrid.events.wire import Message
from hybrid.fleet.state import Promise
from hybrid.fleet.vllm_router import VllmRouter
from hybrid.key import Key, names_of
from hybrid.models.loading import TINY
from hybrid.prompts.encode import load_tokenizer

PAGE = 16
IDS = [*range(10, 10 + 3 * PAGE)]


def replica(name: str, **metadata: Any) -> Any:
    identity = SimpleNamespace(unique_id=name)
    return SimpleNamespace(replica_id=identity, replica_metadata=metadata, routing_stats={})


REPLICAS = [replica(name, page_size=PAGE) for name in ("one", "two")]


COUNT = count(1)


class Alone(VllmRouter):
    """A router without a deployment."""

    curr_replicas: Any = MappingProxyType({})

    def __init__(self, tokenizer: str | None = None) -> None:
        self.initialize_state(tokenizer)


def pending(*args: Any, adapter: str = "", **kwargs: Any) -> Any:
    """A call as Ray has it."""
    metadata = SimpleNamespace(internal_request_id=f"call-{next(COUNT)}", multiplexed_model_id=adapter)
    future = asyncio.get_running_loop().create_future()
    return SimpleNamespace(args=args, kwargs=kwargs, metadata=metadata, future=future)


async def router() -> VllmRouter:
    """A router that has seen the replicas."""
    made = Alone(str(TINY))
    await promised(made, pending(prompt_token_ids=[5, 6]))
    return made


def learn(made: VllmRouter, ids: list[int], namespace: str = "") -> None:
    """Have the replica "two" say that it has all whole pages of a prompt, with a checkpoint."""
    names = names_of(Key.of(ids).ids, namespace, PAGE * 4)[: (len(ids) - 1) // PAGE]
    state = made.state
    assert state is not None
    changes = [Change(True, "pages", b"".join(names), len(names) * PAGE)]
    changes.append(Change(True, "checkpoint", names[-1], len(names) * PAGE))
    state.apply(state.members["two"], Message("feed", 2, False, changes))


async def promised(made: VllmRouter, call: Any) -> tuple[str, int]:
    """Where a call goes, and what is promised of it."""
    call.kwargs.setdefault("promise", Promise(0, 0))
    ranks = await made.choose_replicas(REPLICAS, call)
    assert [len(rank) for rank in ranks] == [1]
    return ranks[0][0].replica_id.unique_id, call.kwargs["promise"].num_tokens


def test_a_prompt_goes_where_its_checkpoint_is_and_until_pages_are_known_anywhere() -> None:
    async def main() -> None:
        made = await router()
        learn(made, IDS)
        assert await promised(made, pending(prompt_token_ids=IDS)) == ("two", 32)
        assert await promised(made, pending(SimpleNamespace(prompt=IDS))) == ("two", 32)
        assert (await promised(made, pending(prompt_token_ids=IDS, cache_salt="ann")))[1] == 0
        assert (await promised(made, pending(SimpleNamespace(prompt=IDS, cache_salt="ann"))))[1] == 0
        assert (await promised(made, pending(prompt_token_ids=IDS, adapter="law")))[1] == 0
        learn(made, IDS, "law,")
        assert await promised(made, pending(prompt_token_ids=IDS, adapter="law")) == ("two", 32)
        for call in (pending(), pending(SimpleNamespace(prompt=["a", "b"])), pending(prompt_token_ids=["no id"])):
            assert await made.choose_replicas(REPLICAS, call) == [REPLICAS]
        unknown, others = Alone(), [replica("three")]
        assert await unknown.choose_replicas(others, pending(prompt_token_ids=IDS)) == [others]

    asyncio.run(main())


def test_text_and_messages_are_encoded_as_the_model_has_them() -> None:
    async def main() -> None:
        made, tokenizer = await router(), load_tokenizer(TINY)
        assert tokenizer is not None
        text = "The with statement is used to wrap the execution of a block. " * 8
        ids = [*tokenizer.encode(text)]
        learn(made, ids)
        whole = (len(ids) - 1) // PAGE * PAGE
        assert await promised(made, pending(SimpleNamespace(prompt=text))) == ("two", whole)
        messages = [{"role": "user", "content": text}]
        found = [*tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
        assert found != ids
        learn(made, found)
        whole = (len(found) - 1) // PAGE * PAGE
        assert await promised(made, pending(SimpleNamespace(messages=messages))) == ("two", whole)

    asyncio.run(main())


def test_a_place_is_given_back_when_a_call_ends_or_is_cancelled() -> None:
    async def main() -> None:
        made = await router()
        learn(made, IDS)
        call, other = pending(prompt_token_ids=IDS), pending(prompt_token_ids=IDS)
        await promised(made, call)
        await promised(made, other)
        numbers = dict(made.under_way)
        await promised(made, call)  # its replica has refused it
        assert made.under_way == numbers and len(numbers) == 3
        for number, name in enumerate(numbers):
            if number == 2:
                other.future.cancel()
                await asyncio.sleep(0)
            else:
                made.on_request_completed(None, name)
        assert made.under_way == {} and made.state is not None
        assert all(made.state.choose(number, ["one", "two"]) is None for number in numbers.values())

    asyncio.run(main())
