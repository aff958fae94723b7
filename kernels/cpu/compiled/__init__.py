"""What Numba compiles. These modules import Numba: a process that finds their machine code on disk imports none of them
(`hybrid.kernels.cpu.machine_code`)."""
