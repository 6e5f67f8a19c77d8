#!/usr/bin/env python3
"""List the packages that a bare GPU machine lacks, as NAME==VERSION, with their sizes here; or make a wheel smaller.

    python scripts/gpu/needed_wheels.py
    python scripts/gpu/needed_wheels.py --thin WHEEL

Walks through the requirements of this project, as the installed packages state them, for CPython 3.12 on x86-64 Linux,
without what bare_machine.txt says is there. Versions come from constraints.txt, else from this environment. --thin
takes out of bitsandbytes the libraries for other versions of CUDA than 13.0 and for other makers' cards, and out of
plotly all but what plotly.js needs, which the reports take from there.
"""

import base64
import hashlib
import os
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TARGET = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "os_name": "posix"}
TARGET |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
# NeMo requires them for a tracker and a storage service.
LEFT_OUT = {"wandb", "aistore"}
KEPT_LIBRARY = "libbitsandbytes_cuda130.so"
OF_PLOTLY = ("plotly/graph_objs/", "plotly/package_data/datasets/", "plotly/labextension/", "widgetbundle.js", "/etc/")


def names_in(file: Path) -> set[str]:
    """Read names that stand in a file, with comments behind #."""
    lines = (line.partition("#")[0] for line in file.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(name) for line in lines for name in line.split()}


def needed(there: set[str]) -> dict[str, str | None]:
    """Return the names of all packages to bring, each with the one that requires it (None: this project)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting: list[tuple[str, str | None]] = [(line, None) for line in project["dependencies"]]
    found: dict[str, str | None] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        line, by = waiting.pop(0)
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name in there or (requirement.marker and not requirement.marker.evaluate({**TARGET, "extra": ""})):
            continue
        found.setdefault(name, by)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                for inner in metadata.requires(name) or []:
                    marker = Requirement(inner).marker
                    applies = marker is None or marker.evaluate({**TARGET, "extra": extra})
                    if applies and (not extra or "extra" in inner.partition(";")[2]):
                        waiting.append((inner.partition(";")[0], name))
    return found


def versions() -> dict[str, str]:
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def installed_mib(name: str) -> float:
    """Return the size of an installed package; its wheel is a third to a half of it."""
    return sum(file.size or 0 for file in metadata.files(name) or []) / 2**20


def thin(wheel: Path) -> None:
    """Take what nothing here needs out of a wheel of bitsandbytes or plotly."""
    aside = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        record, kept = "", []
        for item in old.infolist():
            library = item.filename.rpartition("/")[2]
            other = library.startswith("libbitsandbytes_") and library not in (KEPT_LIBRARY, "libbitsandbytes_cpu.so")
            if item.filename.endswith(".dist-info/RECORD"):
                record = item.filename
            elif not other and not (wheel.name.startswith("plotly") and any(x in item.filename for x in OF_PLOTLY)):
                content = old.read(item)
                new.writestr(item, content, zipfile.ZIP_DEFLATED)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                kept.append(f"{item.filename},sha256={digest},{len(content)}")
        must = KEPT_LIBRARY if wheel.name.startswith("bitsandbytes") else "plotly.min.js"
        if not any(line.partition(",")[0].endswith(must) for line in kept):
            raise SystemExit(f"needed_wheels: {wheel} has no {must}")
        new.writestr(record, "\n".join([*kept, f"{record},,"]) + "\n")
    os.replace(aside, wheel)


def main() -> int:
    """Command line."""
    if sys.argv[1:2] == ["--thin"]:
        thin(Path(sys.argv[2]))
        return 0
    there = names_in(ROOT / "scripts" / "gpu" / "bare_machine.txt") | LEFT_OUT
    pinned, total = versions(), 0.0
    for name, by in sorted(needed(there).items()):
        size = installed_mib(name)
        total += size
        print(f"{name}: {size:.1f} MiB installed, for {by or 'this project'}", file=sys.stderr)
        print(f"{name}=={pinned.get(name) or metadata.version(name)}")
    print(f"{total:.0f} MiB installed; wheels are a third to a half", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
