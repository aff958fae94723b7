"""Operations compiled for the CPU at hand, by Numba. Optional: without Numba the twins in plain torch are used."""
