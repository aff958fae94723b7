from pathlib import Path
_root = Path(__file__).resolve().parent.parent
if (_root / "kernels" / "reference.py").is_file():
    __path__.append(str(_root))
