"""finetune.serve: OpenAI's client and a browser against a server on this machine, and what it refuses."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import uvicorn
from conftest import ROOT

from finetune.evaluation.long_audio import Chunk
from finetune.serve import is_loopback, main, name_and_model, parse_arguments
from finetune.tools.serving.api import ServingLimits, make_app
from finetune.tools.serving.batcher import Batcher, Cancelled, TooLong
from finetune.tools.serving.models import ServedExport, ServedModel

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
PATIENCE = 120  # seconds


@pytest.fixture(scope="module")
def batcher() -> Iterator[Batcher]:
    """The small base model, under two names."""
    from finetune.models.loading import load_model

    model = ServedModel(load_model(str(BASE), None))
    with Batcher({"tuned": model, "base": model}, 4) as made:
        yield made


@pytest.fixture
def served(batcher: Batcher) -> Iterator[Callable[..., str]]:
    """`served(api_key=None, other=None, requests=32)` starts a server; returns its address."""
    stops: list[Callable[[], None]] = []

    def start(api_key: str | None = None, other: Batcher | None = None, **limits: Any) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        app = make_app(other or batcher, ServingLimits(**limits), api_key)
        # The batcher outlives the servers of the single tests.
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()
            listener.close()

        stops.append(stop)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def files(clips: Path) -> list[Path]:
    return sorted(clips.glob("*.flac"))[:6]


def client(address: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def transcript(batcher: Batcher, file: Path) -> dict[str, Any]:
    return batcher.transcribe("base", str(file), None, 3600.0, threading.Event())


def test_the_client_gets_what_transcribe_writes(
    served: Callable[..., str], files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.transcribe import main as transcribe

    assert transcribe(["--model", str(BASE), "--timestamps", *map(str, files[:3])]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(row["text"] for row in rows)
    create = client(served()).audio.transcriptions.create
    for row in rows:
        file = Path(row["file"])
        assert create(model="base", file=file).text == row["text"]
        words = create(
            model="whisper-1",
            file=file,
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert words.text == row["text"]
        assert words.duration == row["duration"]
        assert [(w.word, w.start, w.end) for w in words.words or []] == [
            (w["word"], w["start"], w["end"]) for w in row["words"]
        ]
        assert [s.text for s in words.segments or []] == [s["text"] for s in row["segments"]]


def test_formats(served: Callable[..., str], files: list[Path], batcher: Batcher) -> None:
    address = served()
    text = transcript(batcher, files[0])["text"]
    assert text

    def ask(kind: str) -> httpx.Response:
        form = {"model": "tuned", "response_format": kind}
        with files[0].open("rb") as audio:
            return httpx.post(f"{address}/v1/audio/transcriptions", data=form, files={"file": audio}, timeout=PATIENCE)

    assert ask("text").text == f"{text}\n"
    assert ask("srt").text.startswith("1\n00:00:0")
    assert ask("vtt").text.startswith("WEBVTT\n\n00:00:0")
    assert ask("json").json() == {"text": text}
    assert set(ask("verbose_json").json()) == {"task", "duration", "text", "segments"}


def test_requests_at_once_have_the_texts_that_they_have_alone(
    served: Callable[..., str], files: list[Path], batcher: Batcher
) -> None:
    alone = [transcript(batcher, file)["text"] for file in files]
    create = client(served()).audio.transcriptions.create
    asked = [(n, model) for n in range(len(files)) for model in ("tuned", "base")] * 2
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda a: create(model=a[1], file=files[a[0]]).text, asked))
    assert texts == [alone[n] for n, _ in asked]


@pytest.mark.slow
def test_a_long_recording_is_cut_as_transcribe_cuts_it(
    files: list[Path], tmp_path: Path, batcher: Batcher, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.transcribe import main as transcribe

    parts = [soundfile.read(file, dtype="float32") for file in files]
    rate = parts[0][1]
    pause_S = np.zeros(rate, dtype=np.float32)
    audio_S = np.concatenate([x for samples_S, _ in parts * 8 for x in (samples_S, pause_S)])
    assert len(audio_S) > 60 * rate
    soundfile.write(tmp_path / "long.flac", audio_S, rate)
    assert transcribe(["--model", str(BASE), str(tmp_path / "long.flac")]) == 0
    assert transcript(batcher, tmp_path / "long.flac")["text"] == json.loads(capsys.readouterr().out)["text"]
    with pytest.raises(TooLong):
        batcher.transcribe("base", str(tmp_path / "long.flac"), None, 30.0, threading.Event())
    gone = threading.Event()
    gone.set()
    with pytest.raises(Cancelled):
        batcher.transcribe("base", str(tmp_path / "long.flac"), None, 3600.0, gone)


def test_an_exported_model(served: Callable[..., str], files: list[Path], batcher: Batcher, tmp_path: Path) -> None:
    from finetune.tools.export.layouts import write_layout
    from finetune.tools.export.onnx import graphs_of
    from finetune.tools.export.runtimes import load_exported

    (tmp_path / "graphs").mkdir()
    (tmp_path / "export").mkdir()
    write_layout(graphs_of(str(BASE), tmp_path / "graphs", "onnx"), tmp_path / "export", "onnx", "fp32")
    with Batcher({"exported": ServedExport(load_exported(tmp_path / "export"))}, 4) as other:
        create = client(served(other=other)).audio.transcriptions.create
        for file in files[:3]:
            text = transcript(batcher, file)["text"]
            assert create(model="exported", file=file).text == text
            assert create(model="exported", file=file, response_format="verbose_json").text == text
        with pytest.raises(openai.BadRequestError, match="texts come without times"):
            create(model="exported", file=files[0], response_format="srt")


def test_one_chunk_that_cannot_be_decoded_fails_alone(files: list[Path], batcher: Batcher) -> None:
    samples_S, _ = soundfile.read(files[0], dtype="float32")
    broken_S = samples_S.astype(object)  # torch takes no objects
    chunks = [Chunk(0, samples_S, 0), Chunk(0, broken_S, 0), Chunk(0, samples_S, 0)]
    first, bad, last = [batcher.submit("base", None, chunk) for chunk in chunks]
    assert [t.id for t in first.result(PATIENCE)] == [t.id for t in last.result(PATIENCE)] != []
    with pytest.raises(TypeError):
        bad.result(PATIENCE)


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"model": "other"}, 404, "There is no model 'other'; this server has tuned, base."),
        ({}, 400, "The field model is missing."),
        ({"model": "base", "response_format": "xml"}, 400, "There is no response_format 'xml'"),
        ({"model": "base", "stream": "true"}, 400, "leave stream out"),
        ({"model": "base", "timestamp_granularities[]": "word"}, 400, "need response_format verbose_json"),
    ],
)
def test_what_a_form_cannot_ask_for(
    served: Callable[..., str], files: list[Path], form: dict[str, str], status: int, said: str
) -> None:
    with files[0].open("rb") as audio:
        found = httpx.post(f"{served()}/v1/audio/transcriptions", data=form, files={"file": audio}, timeout=PATIENCE)
    assert found.status_code == status
    assert said in found.json()["error"]["message"]


def test_bad_audio_bodies_and_keys(served: Callable[..., str], files: list[Path], tmp_path: Path) -> None:
    address = served(api_key="secret", megabytes=0.2, minutes=0.01)
    path, key = f"{address}/v1/audio/transcriptions", {"Authorization": "Bearer secret"}

    def post(content: bytes, **more: Any) -> tuple[int, str]:
        form = {"data": {"model": "base"}, "files": {"file": ("a.wav", content)}, "headers": key} | more
        found = httpx.post(path, timeout=PATIENCE, **form)
        return found.status_code, found.json()["error"]["message"]

    assert post(b"x", headers={})[0] == 401
    assert httpx.get(f"{address}/v1/models").status_code == 401
    assert [m.id for m in client(address, "secret").models.list()] == ["tuned", "base"]
    status, said = post(b"no audio at all")
    assert (status, "cannot be decoded: Error opening 'the file'" in said) == (400, True)
    assert post(b"") == (400, "the audio is empty (0 bytes). WAV, FLAC, MP3 and Ogg can be read.")
    assert post(bytes(400_000)) == (413, "The file has more than 0.2 MB.")
    assert post(files[0].read_bytes()) == (400, "The recording is longer than 0.01 minutes.")
    assert post(b"x", files=None)[0] == 400
    assert post(b"x", files={"other": ("a.wav", b"x")})[1] == "The field file is missing: the audio, as a file."

    def pieces() -> Iterator[bytes]:  # no length in the head
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        for _ in range(40):
            yield bytes(10_000)

    found = httpx.post(path, content=pieces(), headers=key | {"Content-Type": "multipart/form-data; boundary=b"})
    assert found.status_code == 413
    assert httpx.get(f"{address}/no").status_code == 404
    assert httpx.get(path).status_code == 405


def test_no_more_requests_at_a_time_than_are_allowed(served: Callable[..., str], files: list[Path]) -> None:
    address = served(requests=1)
    create = client(address).audio.transcriptions.create
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:  # one that never sends its body takes the only place
        head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        slow.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b".encode())
        refused = _until(lambda: _status(create, files[0]), 503)
    assert refused
    assert _until(lambda: _status(create, files[0]), 200)  # its place is free again, for its client has gone


def _status(create: Any, file: Path) -> int:
    try:
        create(model="base", file=file)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def _until(ask: Callable[[], int], wanted: int) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if ask() == wanted:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("microphone", [False, True])
def test_the_page_shows_both_models(
    served: Callable[..., str], files: list[Path], batcher: Batcher, tmp_path: Path, microphone: bool
) -> None:
    from playwright.sync_api import expect, sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium, chromium-browser or google-chrome on this machine")
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    samples_S, rate = soundfile.read(files[0], dtype="float32")
    wav = tmp_path / "clip.wav"
    soundfile.write(wav, samples_S, rate, subtype="PCM_16")
    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    arguments = ["--no-sandbox", *fake, f"--use-file-for-fake-audio-capture={wav}"]
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        page = browser.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(served())
        times = page.locator(".time")
        if microphone:
            page.click("#record")
            expect(page.locator("#status")).to_have_text("recording ...")
            page.wait_for_timeout(1500)
            page.click("#record")
        else:
            page.set_input_files("#file", str(wav))
        expect(times.nth(1)).to_contain_text("s of audio", timeout=1000 * PATIENCE)
        texts = [text.strip() for text in page.locator("article .text").all_inner_texts()]
        browser.close()
    assert not complaints
    assert texts[0] == texts[1] != ""
    if not microphone:
        assert texts[0] == transcript(batcher, wav)["text"]


def test_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert name_and_model("tuned=runs/mine") == ("tuned", "runs/mine")
    assert name_and_model("nvidia/parakeet-tdt-0.6b-v3") == ("parakeet-tdt-0.6b-v3", "nvidia/parakeet-tdt-0.6b-v3")
    assert name_and_model("a/b.nemo") == ("b", "a/b.nemo")
    assert name_and_model("runs/x=1/") == ("x=1", "runs/x=1/")
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2
    for wrong in (
        ["--model", "a/m", "--model", "b/m"],
        ["--model", "m", "--port", "70000"],
        ["--model", "m", "--max-minutes", "0"],
    ):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)
    assert "name them: --model tuned=A --model base=B" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--model", str(BASE), "--port", str(taken.getsockname()[1])]) == 1
    assert "Choose another --port" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "nemo-conformer-tdt"}')
    (tmp_path / "encoder-model.onnx").touch()
    (tmp_path / "vocab.txt").touch()
    assert main(["--model", str(tmp_path), "--port", "0", "--head", "ctc"]) == 2
    assert "is an export: its head is chosen" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none.nemo"), "--port", "0"]) == 2
