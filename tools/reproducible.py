"""The build backend: that of setuptools, with archives that depend on nothing but the files in them.

Two builds of the same files have equal bytes, whoever builds them, where, and when: entries are sorted, have one owner,
one time (`SOURCE_DATE_EPOCH`, or the beginning of 2026), and modes that do not depend on the umask; a wheel does not
name the version of setuptools that made it.

A wheel holds Python alone and is the same file on every machine: no compiler runs while it is built.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
import time
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

BEGIN_OF_2026 = 1767225600


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
    (about,) = (file for file in entries if file.endswith(".dist-info/WHEEL"))
    entries[about] = entries[about][0], re.sub(rb"(?m)^Generator: .*$", b"Generator: hybrid", entries[about][1])
    (record,) = (file for file in entries if file.endswith(".dist-info/RECORD"))
    entries[record] = entries[record][0], recorded({file: content for file, (_, content) in entries.items()}, record)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, (entry, content) in sorted(entries.items()):
            plain = zipfile.ZipInfo(file, date_time=time.gmtime(epoch())[:6])
            plain.external_attr = (0o100000 | mode_of(entry.external_attr >> 16, entry.is_dir())) << 16
            plain.compress_type = zipfile.ZIP_DEFLATED
            plain.create_system = 3
            archive.writestr(plain, content)
    return name


def recorded(files: dict[str, bytes], record: str) -> bytes:
    """The record of a wheel: the hash and the size of every file but the record itself."""
    lines = [f"{record},,\n"]
    for file in sorted(files.keys() - {record}):
        digest = urlsafe_b64encode(sha256(files[file]).digest()).decode().rstrip("=")
        lines.append(f"{file},sha256={digest},{len(files[file])}\n")
    return "".join(lines).encode()


def epoch() -> int:
    """The time of all entries, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", BEGIN_OF_2026))


def mode_of(mode: int, is_folder: bool) -> int:
    """Readable by all, and executable where it was."""
    return 0o755 if is_folder or mode & 0o100 else 0o644
