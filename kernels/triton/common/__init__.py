"""What several Triton kernels share: tiles of ragged batches, tile sizes of attention, products in two halves."""
