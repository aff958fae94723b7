"""A process that compiles (`hybrid.kernels.cpu.processes`): it reads functions and writes their code, as long as there
are some."""

import os
import pickle
import sys

from hybrid.kernels.cpu.compiled.build import compiled
from hybrid.kernels.cpu.functions import Function


def main() -> None:
    """Answer what is read from standard input: with the code of each function, or None where it cannot be compiled."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed meanwhile is not an answer
    while True:
        try:
            function: Function = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = compiled(function)
        except Exception:  # whatever Numba raises: who needs the function compiles it again, and sees it
            answer = None
        pickle.dump(answer, answers)
        answers.flush()
