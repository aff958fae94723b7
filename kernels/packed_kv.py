"""Keys and values kept in a byte per element: rows of codes, each with its own scale.

A *row* is the key, or the value, of one token and one head. It is packed into `row_size(head_dim)` bytes: its codes,
and in the last four bytes its scale in fp32, so that nothing can move the one without the other. What is kept of a
token depends on this token alone: not on the rest of its page, nor on how the page was filled.

| kept as | code | scale | an element is off by at most |
|---|---|---|---|
| `int8` | an integer from -127 to 127 | a 127th of the row's largest magnitude | half a scale |
| `fp8` | e4m3: 4 significant bits | a 448th of it | a sixteenth of itself, or a 1024th of a scale |

Plain torch, on any device. In pages whose type is one of `KV_DTYPES` rows are packed; the type computed with is that
of the queries.
"""

import torch
from torch import Tensor

from hybrid.kernels.codec import quantize_rows
from hybrid.kernels.cpu.kinds import FP8_MAX, SCALE_BYTES

KV_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of codes, by name."""


def row_size(head_dim: int) -> int:
    """Bytes of a packed row of `head_dim` elements."""
    return (-(-head_dim // SCALE_BYTES) + 1) * SCALE_BYTES


def is_packed(pages: Tensor) -> bool:
    """Tell whether pages hold packed rows."""
    return pages.dtype in KV_DTYPES.values()


def pack(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack rows. One that holds a NaN or an infinity comes back as NaN, as a whole where codes are int8.

    Args:
        values: `[..., head_dim]` floats.
        dtype: of the codes.

    Returns:
        `[..., row_size(head_dim)]` uint8.
    """
    codes, scales = quantize_rows(values) if dtype == torch.int8 else _to_fp8(values)
    head_dim = values.shape[-1]
    rows = torch.zeros(*values.shape[:-1], row_size(head_dim), dtype=torch.uint8, device=values.device)
    rows[..., :head_dim] = codes.view(torch.uint8)
    rows[..., -SCALE_BYTES:] = scales.unsqueeze(-1).view(torch.uint8)
    return rows


def unpack(rows: Tensor, head_dim: int, kept: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The values of packed rows.

    Args:
        rows: `[..., row_size(head_dim)]` uint8, the last dimension contiguous.
        kept: type of the codes.
        dtype: of the result.

    Returns:
        `[..., head_dim]`: each code times its scale, rounded once, where `dtype` has fewer bits than that.
    """
    codes = rows[..., :head_dim].view(kept).float()
    return codes.mul_(rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


def _to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, as `quantize_rows`: a code times its scale is exact in fp32."""
    values = values.float()
    scales = values.abs().amax(-1).div_(FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    scales.view(torch.int32).bitwise_and_(-128)
    return (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales
