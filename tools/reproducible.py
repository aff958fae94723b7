"""The build backend: that of setuptools, with archives that depend on nothing but the files in them.

Two builds of the same files have equal bytes, whoever builds them, where, and when: entries are sorted, have one owner,
one time (`SOURCE_DATE_EPOCH`, or the beginning of 2026), and modes that do not depend on the umask.

A wheel holds code for CPUs, too (`hybrid.kernels.cpu.shipped`), as data: it is read on Linux and x86-64, and only where
it was compiled from the sources in the wheel. It is compiled where Numba is at hand, which installers are asked for
where it has wheels. Equal versions of Numba, of LLVM's package and of Python make equal code; next to it are paths of
the sources as they were built, which Numba keeps for exceptions. `--config-settings code=none` builds without it, and
`code=FOLDER` takes it from a folder.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import sys
import tarfile
import time
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_code import write_levels
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

BEGIN_OF_2026 = 1767225600

NUMBA = "numba>=0.61"

FOLDER_OF_CODE = "hybrid/kernels/cpu/levels"


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build the source distribution; returns its name."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory) / name
    entries: list[tuple[tarfile.TarInfo, bytes | None]] = []
    with tarfile.open(path) as archive:
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            entries.append((entry, file.read() if file is not None else None))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, content in sorted(entries, key=lambda pair: pair[0].name):
            entry.mtime, entry.mode = epoch(), mode_of(entry.mode, entry.isdir())
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.pax_headers = {}
            archive.addfile(entry, io.BytesIO(content) if content is not None else None)
    path.write_bytes(gzip.compress(packed.getvalue(), compresslevel=6, mtime=epoch()))
    return name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build the wheel; returns its name."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory) / name
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: (entry, archive.read(entry)) for entry in archive.infolist()}
    ours = {f"{FOLDER_OF_CODE}/{file}": content for file, content in code_of_levels(config_settings).items()}
    (record,) = (file for file in entries if file.endswith(".dist-info/RECORD"))
    lines = "".join(f"{file},{hash_of(content)},{len(content)}\n" for file, content in sorted(ours.items()))
    entries[record] = entries[record][0], lines.encode() + entries[record][1]
    entries |= {file: (zipfile.ZipInfo(file), content) for file, content in ours.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, (entry, content) in sorted(entries.items()):
            plain = zipfile.ZipInfo(file, date_time=time.gmtime(epoch())[:6])
            plain.external_attr = (0o100000 | mode_of(entry.external_attr >> 16, entry.is_dir())) << 16
            plain.compress_type = zipfile.ZIP_DEFLATED
            plain.create_system = 3
            archive.writestr(plain, content)
    return name


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What installers install before they build a wheel."""
    found: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    is_known = sys.platform == "linux" and platform.machine() == "x86_64" and sys.implementation.name == "cpython"
    compiles = is_known and sys.version_info < (3, 15) and "code" not in (config_settings or {})
    return [*found, NUMBA] if compiles else found


def code_of_levels(config_settings: Any = None) -> dict[str, bytes]:
    """Files with code for CPUs, by name: none where there is no Numba."""
    asked = (config_settings or {}).get("code")
    if asked == "none":
        return {}
    with TemporaryDirectory() as made:
        if asked is None:
            try:
                write_levels(Path(made))
            except Exception as error:  # no Numba, or one that does not run here
                print(f"the wheel has no code for CPUs: {error}")
        return {path.name: path.read_bytes() for path in Path(asked or made).iterdir()}


def hash_of(content: bytes) -> str:
    """As wheels record it."""
    return f"sha256={urlsafe_b64encode(sha256(content).digest()).decode().rstrip('=')}"


def epoch() -> int:
    """The time of all entries, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", BEGIN_OF_2026))


def mode_of(mode: int, is_folder: bool) -> int:
    """Readable by all, and executable where it was."""
    return 0o755 if is_folder or mode & 0o100 else 0o644
