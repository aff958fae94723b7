"""LoRA adapters, which requests name as their model: listed, and loaded and unloaded at run time as vLLM's paths do."""

from __future__ import annotations

import asyncio

from hybrid.errors import CheckpointError
from hybrid.models.adapters import load_adapter
from hybrid.server.call import Call
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.service import Server


async def load_lora_adapter(server: Server, call: Call) -> None:
    """Answer `POST /v1/load_lora_adapter`: the adapter is read beside the engine, which runs requests meanwhile."""
    fields, name = await _read(server, call)
    folder = _needed(fields, "lora_path")
    fields.only("load_inplace", False)
    fields.only("is_3d_lora_weight", False)
    fields.close()
    if name == server.name:
        raise HttpError(400, f"{name!r} is the model itself; choose another name", "lora_name", "name_in_use")
    assert server.adapter_folder is not None
    path = await asyncio.to_thread(server.adapter_folder.find, folder)
    try:
        adapter = await asyncio.to_thread(load_adapter, path, server.engine.engine.model)
    except CheckpointError as error:
        raise HttpError(400, str(error), "lora_path", error.code) from error
    await server.engine.call(lambda engine: engine.adapters.add(name, adapter))
    await call.respond(f"Success: the adapter {name!r} is loaded.".encode())


async def unload_lora_adapter(server: Server, call: Call) -> None:
    """Answer `POST /v1/unload_lora_adapter`: refused while requests use it."""
    fields, name = await _read(server, call)
    fields.ignore("lora_int_id")
    fields.close()
    if name not in server.engine.engine.adapters:
        raise HttpError(404, f"no adapter {name!r:.100} is loaded", "lora_name", "adapter_not_found")
    await server.engine.call(lambda engine: engine.adapters.unload(name))
    await call.respond(f"Success: the adapter {name!r} is unloaded.".encode())


async def _read(server: Server, call: Call) -> tuple[Fields, str]:
    """The fields of a body, and the name of the adapter in it.

    Raises:
        HttpError: the caller may not change what others use, or there is no name.
    """
    if not call.tenant.sees_all:
        raise HttpError(403, "adapters are loaded and unloaded with a key of a tenant that has sees_all")
    fields = await server.read(call, lambda fields, model: fields)
    return fields, _needed(fields, "lora_name")


def _needed(fields: Fields, name: str) -> str:
    """A text that is there.

    Raises:
        HttpError: it is not.
    """
    found = fields.text(name)
    if not found:
        raise fields.refuse(name, "a text", found)
    return found
