"""Workers of a process that is killed do not stay behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, read_lines, write_manifest

from finetune.data.worker_lifetime import ends_with_this_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does this")

# The batches are larger than a pipe, so that workers wait for a reader.
READS = """
import sys, time
import psutil
import torch.utils.data._utils.worker
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # torch's own look whether the parent lives
from stream_cases import make_stream

stream = make_stream(sys.argv[1], workers=2, batch_size=1)
batches = stream.batches()
next(batches)
time.sleep(1)  # the workers fill their pipes
print(*(child.pid for child in psutil.Process().children()), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
@linux
def test_workers_that_wait_for_a_reader_end_with_their_killed_parent(corpus: Path, tmp_path: Path) -> None:
    rows = [
        {**row, "text": 40_000 * row["text"], "audio_filepath": str(corpus / row["audio_filepath"])}
        for row in read_lines(corpus / "manifest.jsonl")
    ]
    manifest = write_manifest(tmp_path / "long_texts.jsonl", rows)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    with subprocess.Popen([sys.executable, "-c", READS, manifest], stdout=subprocess.PIPE, env=environment) as parent:
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        try:
            assert len(workers) == 2
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            assert not psutil.wait_procs(workers, timeout=900)[1]
        finally:
            for worker in workers:
                if worker.is_running():
                    worker.kill()


@linux
def test_only_workers_of_the_main_thread_are_tied_to_it() -> None:
    """The kernel would kill those of another thread as soon as that ends."""
    found = []
    thread = threading.Thread(target=lambda: found.append(ends_with_this_process()))
    thread.start()
    thread.join()
    assert found == [None]
    assert ends_with_this_process() is not None
