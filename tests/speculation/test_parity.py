"""The lines of `hybrid parity` on drafts: the small model, pages of 64 tokens, and the kernels of this CPU."""

from hybrid import CacheConfig, Engine
from hybrid.commands.judge import Judge
from hybrid.commands.parity_drafts import drafts


def test_drafts_of_every_kind_change_no_bit() -> None:
    engine = Engine.from_pretrained("tiny", dtype="float32", cache=CacheConfig(memory="256MiB", deterministic=True))
    checks = drafts(Judge(engine))
    assert [f"{check.name}: {check.detail}" for check in checks if not check.passed] == []
    assert len(checks) == 16
