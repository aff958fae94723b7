"""Operations compiled for the CPU at hand, by Numba."""
