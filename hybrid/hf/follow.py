"""Following the forward passes of a model, so that a past learns the tokens that are computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hybrid.errors import NonFiniteError
from hybrid.hf.installed import cache_in
from hybrid.hf.pass_model import PassModel
from hybrid.hf.past import Past
from hybrid.interrupts import deferred_interrupts


@contextmanager
def following(model: PassModel, past: Past) -> Iterator[None]:
    """Within this context `past`, and its forks, learn the tokens that the model computes with them.

    The hooks are on the model and on the model inside it: a wrapper's `generate` calls the latter. A pass that both see
    is followed once.

    Raises:
        NonFiniteError: by a pass with one of these pasts whose logits are not finite.
        RequestError: by a pass that does not begin where its past ends.
        VersionError: one of these pasts is extended by a pass that no hook has seen.
    """

    def member_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Past | None:
        found = cache_in(args, kwargs)
        return found if isinstance(found, Past) and any(found is member for member in past.family) else None

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        member = member_in(args, kwargs)
        if member is not None:
            member.begin_pass(kwargs.get("position_ids"))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        member = member_in(args, kwargs)
        if member is not None:
            logits = output[0] if isinstance(output, tuple) else output.logits
            if not finite_logits(logits[:, -1]):
                member.forget_tokens()
                raise NonFiniteError(
                    "a pass of the model gave logits with NaN or infinity; nothing of it is cached, and this past "
                    "cannot be used any more"
                )
            member.follow(kwargs.get("input_ids", args[0] if args else None))

    handles: list[RemovableHandle] = []
    try:
        with deferred_interrupts():
            for module in {model.outer, model.inner}:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
        for member in past.family:
            member.refuse_unseen()
    finally:
        with deferred_interrupts():
            for handle in handles:
                handle.remove()


def finite_logits(logits: Tensor) -> bool:
    """Whether logits, `[..., vocabulary]`, have no NaN and no infinity. Minus infinity is allowed for masked tokens."""
    return bool(logits.amax(-1).isfinite().all())
