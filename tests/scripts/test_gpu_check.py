"""The check on a GPU, rehearsed on a CPU: its parts, its table of goals, and what a bare machine needs for it."""

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, reset_process

sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import needed_wheels
import report

# Hides every installed package but torch, Triton, numba and what these need, and then rehearses both loss parts.
ALONE = """
import re, runpy, sys
from importlib import metadata
from importlib.machinery import PathFinder

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

allowed, waiting = set(), ["torch", "triton", "numba", "numpy"]
while waiting:
    name = waiting.pop()
    if name not in allowed:
        allowed.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            needs = []
        waiting += [plain(re.match(r"[\\w.-]+", need)[0]) for need in needs if "extra ==" not in need]
owners = metadata.packages_distributions()

class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.partition(".")[0]
        names = set(map(plain, owners.get(package, [])))
        if names and not names & allowed and package != "finetune":
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
loss, check, bench = sys.argv[1:]
sys.argv[1:] = ["--rehearsal", "--json", loss]
try:
    runpy.run_path(check, run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
sys.path.insert(0, bench)
import tdt_loss
case = {**tdt_loss.CASES["gpu_v8192"], **tdt_loss.REHEARSED}
for side in ("floor", "fused"):
    assert tdt_loss.measure(case, side, tdt_loss.SIDES["gpu_v8192"][side], 1)["seconds"] > 0
print(tdt_loss.machine()["torch"])
try:
    import nemo
except ModuleNotFoundError:
    print("NeMo is not there")
"""


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_loss_parts_need_torch_triton_and_numba_alone(tmp_path: Path) -> None:
    loss = tmp_path / "loss.json"
    scripts = ROOT / "scripts"
    done = start(sys.executable, "-c", ALONE, str(loss), str(scripts / "gpu/check_loss.py"), str(scripts / "bench"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NeMo is not there" in done.stdout
    found = json.loads(loss.read_text())
    assert found["failed"] == []
    assert len(found["checks"]) > 40
    assert all(0 <= check["off"] <= check["tolerance"] for check in found["checks"])


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended_and_the_table_is_there(tmp_path: Path) -> None:
    done = start("bash", "scripts/gpu_check.sh", "--rehearsal", str(tmp_path), PARTS="loss", PART_SECONDS="1")
    assert done.returncode == 1
    assert "loss was ended after 1 s" in done.stdout
    assert (tmp_path / "loss.exit").read_text().startswith("124 ")
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["rehearsed"]
    assert "FAILED: loss" in done.stdout
    assert "say nothing about a GPU" in (tmp_path / "gpu.md").read_text()


def test_what_the_check_refuses() -> None:
    done = start("bash", "scripts/gpu_check.sh", PARTS="speed")
    assert (done.returncode, "there is no part speed. PARTS takes some of: loss" in done.stderr) == (2, True)
    done = start("bash", "scripts/gpu_check.sh", PYTHON="/nowhere/python")
    assert (done.returncode, "there is no interpreter /nowhere/python" in done.stderr) == (1, True)


# ---- the table of goals --------------------------------------------------------------------------------------------


def parts_of(scale: float) -> dict[str, Any]:
    """Figures of all parts; with a scale of 1 they are what is wanted, and with a smaller one better."""
    nemo = {"seconds": 3.0, "memory_bytes": 15e9, "largest_batch": 2}
    sides = {
        "floor": {"seconds": 1 / 1.7},
        "fused": {"seconds": scale, "memory_bytes": 1e9 * scale},
        "nemo plain": nemo,
    }
    sides |= {"transformers": {"seconds": 5.0, "memory_bytes": 9e9}, "nemo fused batch": {"failed": "no driver"}}
    learnt = {"floor": {"seconds": 1.0}, "fused 1e-4": {"seconds": 0.8 * scale}}
    rows = [
        {"name": name, "peak_bytes": peak * 1e9 * scale, "seconds_per_step": t, "predicted_over_measured": 1.04}
        for name, peak, t in (("adamw", 22, 1.0), ("recommended", 11, 1.25 * scale), ("recommended_small", 7.5, 2.0))
    ]
    speed = {"ours": 2300 / scale, "nemo": 700.0, "transformers": 700.0}
    side = {name: {"audio_hours_an_hour": rate} for name, rate in speed.items()}
    side["ours"]["share_of_published_peak"] = 0.25 / scale
    found: dict[str, Any] = {
        "loss_time": {"cases": {"gpu_v8192": sides}},
        "loss_learnt": {"cases": {"gpu_v8192_learnt": learnt}},
        "largest_batch": {"cases": {"gpu_24gb": {"fused": {"largest_batch": 16 / scale}, "nemo plain": nemo}}},
        "step": {"rows": rows},
        "throughput": {"sides": side},
        "evaluation": {"bfloat16": {"rtfx": 1500 / scale}, "texts": {"differing": 0}},
        "encoder": {"rows": [*rows, *({**rows[0], "name": f"adamw [{s}]"} for s in report.SWITCHES)]},
        "strategies_1": {"rows": [*rows, {"name": "lora", "reason": "not measured yet"}]},
        "strategies_2": {"rows": [*rows, {"name": "ddp", "reason": "needs 2 GPUs, there is 1"}]},
    }
    found |= {name: {} for name in ("loss", "optimizers", "activation_offload")}
    return {name: {"exit_code": 0, "seconds": 60, **part} for name, part in found.items()}


def test_verdicts_on_goals() -> None:
    better, worse = report.judge(parts_of(0.9)), report.judge(parts_of(1.2))
    assert {g["verdict"] for g in better} == {"reached", "measured"}
    still = ("texts of", "rows without", "exit code", "plan off")
    missed = {g["what"] for g in worse if g["verdict"] == "missed"}
    assert missed == {g["what"] for g in worse if not g["what"].startswith(still) and g["limit"] is not None}
    none = report.judge({})
    assert all(g["verdict"].startswith('not measured: PARTS="') and g["figure"] is None for g in none)
    assert {g["verdict"] for g in report.judge(parts_of(0.9), rehearsed=True)} == {"rehearsed"}


def test_strategies_that_are_left_to_another_call_are_not_missed() -> None:
    def verdict(reason: str) -> str:
        parts = parts_of(0.9)
        parts["strategies_3"] = {"rows": [{"name": "lora", "reason": reason}], "exit_code": 0, "seconds": 1}
        return next(g["verdict"] for g in report.judge(parts) if g["what"] == "rows without a figure")

    assert verdict("not measured yet: the --minutes were over").startswith("not measured: PARTS=")
    assert verdict("exit code 1: killed") == "missed"
    assert verdict("needs 2 GPUs, there is 1") == "reached"


def test_a_failed_side_leaves_the_other_figures() -> None:
    parts = parts_of(0.9)
    parts["loss_time"]["cases"]["gpu_v8192"]["nemo plain"] = {"failed": "out of memory"}
    verdicts = {g["what"]: g["verdict"] for g in report.judge(parts) if g["part"] == "loss_time"}
    assert verdicts["time / floor of four products"] == "reached"
    assert verdicts["times faster than NeMo's best"].startswith("not measured")


def test_the_page_of_goals_is_what_the_report_writes() -> None:
    kept = json.loads((ROOT / "docs/benchmarks/gpu.json").read_text(encoding="utf-8"))
    assert kept["goals"] == report.judge(kept["parts"])
    assert (ROOT / "docs/benchmarks/gpu.md").read_text(encoding="utf-8") == report.markdown(kept)


# ---- wheels for a bare machine -------------------------------------------------------------------------------------


def test_wheels_are_of_what_the_machine_lacks() -> None:
    there = needed_wheels.names_in(ROOT / "scripts/gpu/bare_machine.txt") | needed_wheels.LEFT_OUT
    found, pinned = needed_wheels.needed(there), needed_wheels.versions()
    lacking = "nemo-toolkit omegaconf hydra-core soundfile soxr lhotse librosa jiwer datasets torchao bitsandbytes "
    assert set((lacking + "flashoptim deepspeed antlr4-python3-runtime pydantic-core rapidfuzz").split()) <= set(found)
    assert not {"torch", "triton", "numba", "numpy", "transformers", "wandb", "nvidia-cublas"} & set(found)
    assert set(found) <= set(pinned), "each has an exact version"
    assert sum(map(needed_wheels.installed_mib, found)) < 255


def test_a_thinned_wheel_installs(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-0.1-py3-none-any.whl"
    about = "bitsandbytes-0.1.dist-info"
    libraries = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cuda118", "cuda130", "cpu", "rocm64")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("bitsandbytes/__init__.py", *libraries, f"{about}/RECORD"):
            archive.writestr(name, "")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.1\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    needed_wheels.thin(wheel)
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(tmp_path / "site")]
    done = start(sys.executable, "-m", "pip", "install", *options, str(wheel))
    assert done.returncode == 0, done.stderr
    left = {path.name for path in (tmp_path / "site" / "bitsandbytes").iterdir()}
    assert left == {"__init__.py", "libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so"}


PIP_WITHOUT_A_NETWORK = """#!/usr/bin/env bash
# Stands in for pip alone: wheels without content, and none for hjson and deepspeed, which have sources only.
if [ "$1 $2" != "-m pip" ]; then exec {python} "$@"; fi
while [ $# -gt 1 ]; do
    case $1 in download | wheel) what=$1 ;; --dest | --wheel-dir) folder=$2 ;; esac
    shift
done
case $what:$1 in download:hjson==* | download:deepspeed==*) exit 1 ;; esac
echo "$what $1" >>"$(dirname "$0")/asked"
name=$(tr - _ <<<"${{1%%==*}}")-${{1##*==}}
case $1 in
    bitsandbytes==* | plotly==*) cp "$(dirname "$0")/${{1%%==*}}.whl" "$folder/$name-py3-none-any.whl" ;;
    *) head -c ${{BYTES:-9}} /dev/zero >"$folder/$name-{tag}.whl" ;;
esac
"""


@pytest.mark.parametrize(
    ("tag", "size", "said"),
    [("cp312-cp312-manylinux_2_28_x86_64", "9", ""), ("cp311-cp311-linux_x86_64", "9", "is not for CPython 3.12"),
     ("py3-none-any", "2000000", "more than 35 MiB")],
)  # fmt: skip
def test_wheels_are_downloaded_or_built_thinned_and_counted(tmp_path: Path, tag: str, size: str, said: str) -> None:
    for name, files in {
        "bitsandbytes": ("libbitsandbytes_cuda118.so", "libbitsandbytes_cuda130.so"),
        "plotly": ("plotly/graph_objs/a.py", "plotly/package_data/plotly.min.js"),
    }.items():
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            for file in (*files, f"{name}.dist-info/RECORD"):
                archive.writestr(file, "")
    python = tmp_path / "python"
    python.write_text(PIP_WITHOUT_A_NETWORK.format(python=sys.executable, tag=tag))
    python.chmod(0o755)
    done = start("bash", "scripts/gpu/make_wheels.sh", str(tmp_path / "wheels"), str(python), BYTES=size)
    assert done.returncode == (1 if said else 0), done.stderr
    assert said in done.stderr
    if not said:
        asked = (tmp_path / "asked").read_text().splitlines()
        pinned = needed_wheels.versions()
        assert {f"wheel {name}=={pinned[name]}" for name in ("hjson", "deepspeed")} <= set(asked)
        assert sum(line.startswith("download ") for line in asked) == len(asked) - 2
        assert f"{len(asked)} wheels, 0 MiB" in done.stdout
        (plotly,) = (tmp_path / "wheels").glob("plotly-*.whl")
        assert zipfile.ZipFile(plotly).namelist() == ["plotly/package_data/plotly.min.js", "plotly.dist-info/RECORD"]


# ---- the dress rehearsal: the code of all parts with small sizes ---------------------------------------------------


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, dict[str, Any]]]]:
    """`rehearse("throughput", ...)` runs a script of scripts/bench in this process; returns exit code and figures."""

    def run(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
        file = tmp_path / f"{name}.json"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--rehearsal", "--json", str(file), *arguments])
        return importlib.import_module(name).main(), json.loads(file.read_text())

    yield run
    reset_process()


@pytest.mark.slow
def test_the_loss_rehearsed(rehearse) -> None:
    """NeMo's TDT loss has no kernel for a CPU: its sides fail, and the others are measured."""
    cases = ("gpu_v8192", "gpu_v8192_learnt", "gpu_24gb")
    code, found = rehearse("tdt_loss", "--repeats", "1", "--cases", *cases)
    failed = {(case, side) for case in cases for side, r in found["cases"][case].items() if "failed" in r}
    assert code == 1
    assert failed == {(case, f"nemo {how}") for case in cases[::2] for how in ("plain", "fused batch")}
    flat, learnt, largest = (found["cases"][case] for case in cases)
    assert flat["fused 1e-4"]["loss"] == pytest.approx(flat["transformers"]["loss"], rel=0.05), "other dropout masks"
    assert learnt["fused 1e-4"]["loss"] < 0.5 * flat["fused 1e-4"]["loss"], "it has learnt"
    assert all(flat[side]["seconds"] > 0 for side in ("floor", "fused", "transformers"))
    assert largest["fused"]["largest_batch"] == largest["transformers"]["largest_batch"] == 4


@pytest.mark.slow
def test_throughput_rehearsed(rehearse, tmp_path: Path) -> None:
    code, found = rehearse("throughput", "--sides", "ours", "transformers", "--folder", str(tmp_path / "work"))
    ours, theirs = found["sides"]["ours"], found["sides"]["transformers"]
    assert code == 0
    for side in (ours, theirs):
        assert side["clips"] > 0
        assert side["audio_hours_an_hour"] == pytest.approx(side["audio_seconds"] / side["seconds"])
    assert ours["model_flops"]["encoder"] > ours["model_flops"]["joint"] > 0
    assert ours["flops_a_second"] == pytest.approx(sum(ours["model_flops"].values()) / ours["seconds"])


def test_a_side_that_runs_out_of_memory_gets_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    throughput = importlib.import_module("throughput")
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-4:-2])
        if len(asked) == 1:
            return subprocess.CompletedProcess(command, 1, stderr="torch.OutOfMemoryError: CUDA out of memory.")
        if command[-1] == "ours":
            return subprocess.CompletedProcess(command, 1, stderr="KeyError: 'text'")
        (tmp_path / f"{command[-1]}.json").write_text('{"seconds": 2.0}')
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(throughput.subprocess, "run", run)
    given = {"rehearsal": False, "folder": tmp_path, "batch_seconds": 1200.0, "transformers_seconds": 320.0}
    found = throughput.side_alone("nemo", SimpleNamespace(**given), "cuda")
    assert found == {"batch_seconds": 600.0, "seconds": 2.0}
    assert asked[1] == ["--batch-seconds=600.0", "--transformers-seconds=160.0"]
    assert throughput.side_alone("ours", SimpleNamespace(**given), "cuda") == {
        "failed": "exit code 1: KeyError: 'text'"
    }
    assert len(asked) == 3


@pytest.mark.slow
def test_evaluation_rehearsed(rehearse, tmp_path: Path) -> None:
    code, found = rehearse("evaluation", "--folder", str(tmp_path / "work"))
    assert (code, found["texts"]["clips"], found["bfloat16"]["clips"]) == (0, 6, 8)
    assert found["texts"]["differing"] == 0
    assert found["bfloat16"]["rtfx"] > found["bfloat16"]["rtfx_whole"] > 0


@pytest.mark.slow
def test_every_part_rehearsed(tmp_path: Path) -> None:
    done = start("bash", "scripts/gpu_check.sh", "--rehearsal", str(tmp_path))
    codes = {path.stem: path.read_text().split()[0] for path in tmp_path.glob("*.exit")}
    of_nemo = {"loss_time", "largest_batch"}
    assert {name for name, code in codes.items() if code != "0"} == of_nemo, done.stdout[-3000:] + done.stderr[-3000:]
    goals = json.loads((tmp_path / "gpu_check.json").read_text())["goals"]
    lacking = {g["what"] for g in goals if g["verdict"] != "rehearsed"}
    nemos_loss = {"times faster than NeMo's best", "NeMo's least memory / ours", "times NeMo's"}
    assert lacking == nemos_loss | {"model FLOPs / published peak"}
    assert len(json.loads((tmp_path / "encoder.json").read_text())["rows"]) == 5
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["adamw", "recommended", "recommended_small"]
    assert all(0.5 < row["predicted_over_measured"] < 2 for row in rows)
