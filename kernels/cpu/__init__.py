"""Operations compiled for the CPU at hand, by Numba. Optional: where there is neither code that comes with the package
nor Numba, the twins in plain torch are used."""
