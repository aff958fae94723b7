"""Our Triton kernels. Each has its twin in plain torch in `hybrid.kernels.reference`: the same file name, function name
and signature. What several kernels share: `packed_kv` and `ragged`.

In Triton's interpreter (`TRITON_INTERPRET=1`) importing them installs a `tl.dot` that sums in a fixed order, as a GPU
does: results are then as independent of the batch as on a GPU.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from hybrid.kernels.triton.interpreter import install_fixed_order_dot

    install_fixed_order_dot()
