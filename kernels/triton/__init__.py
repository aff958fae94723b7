"""Our Triton kernels. Each has its twin in plain torch in `hybrid.kernels.reference`: the same file name, function name
and signature. What several kernels share is in `hybrid.kernels.triton.common`."""
