// Records or reads a file, turns it into WAV, and shows what each model of the server writes.
"use strict";
(() => {
  const RATE = 16000;
  const byId = (id) => document.getElementById(id);
  const record = byId("record"), file = byId("file"), status = byId("status"), audio = byId("audio"), key = byId("key");
  const columns = [...document.querySelectorAll("article[data-model]")];
  const say = (text) => { status.textContent = text; };
  let recorder = null, url = null, turn = 0;

  // What the browser can decode, libsndfile may not (WebM, MP4): the server gets WAV, one channel of 16 bits.
  async function toWav(blob) {
    const context = new AudioContext();
    const decoded = await context.decodeAudioData(await blob.arrayBuffer()).finally(() => context.close());
    const length = Math.max(1, Math.ceil(decoded.duration * RATE));
    const offline = new OfflineAudioContext(1, length, RATE);
    const source = offline.createBufferSource();
    source.buffer = decoded;
    source.connect(offline.destination);
    source.start();
    const samples = (await offline.startRendering()).getChannelData(0);
    const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
    const letters = (place, text) => [...text].forEach((c, i) => view.setUint8(place + i, c.charCodeAt(0)));
    letters(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); letters(8, "WAVEfmt ");
    view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
    view.setUint32(24, RATE, true); view.setUint32(28, 2 * RATE, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
    letters(36, "data"); view.setUint32(40, 2 * samples.length, true);
    samples.forEach((s, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, s)) * 32767, true));
    return { wav: new Blob([view], { type: "audio/wav" }), seconds: decoded.duration };
  }

  async function ask(model, wav) {
    const form = new FormData();
    form.append("file", wav, "audio.wav");
    form.append("model", model);
    const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
    const answer = await fetch("v1/audio/transcriptions", { method: "POST", body: form, headers });
    if (answer.status === 401) byId("keyed").hidden = false;
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error ? body.error.message : `HTTP ${answer.status}`);
    return { text: body.text, took: Number(answer.headers.get("x-processing-seconds")) };
  }

  // Longest common subsequence of words: which words of b are not in a.
  function unlike(a, b) {
    const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
    const found = new Set(b.keys());
    for (let i = 0, j = 0; i < a.length && j < b.length;) {
      if (a[i] === b[j]) { found.delete(j); i++; j++; } else if (best[i + 1][j] >= best[i][j + 1]) i++; else j++;
    }
    return found;
  }

  function show(column, text, others) {
    const place = column.querySelector(".text"), words = text.split(" ");
    const marked = others === null ? new Set() : unlike(others.split(" "), words);
    place.replaceChildren(...words.flatMap((word, i) => {
      const node = document.createElement(marked.has(i) ? "mark" : "span");
      node.textContent = word;
      return [node, " "];
    }));
  }

  async function transcribe(blob) {
    const mine = ++turn;
    if (url) URL.revokeObjectURL(url);
    url = URL.createObjectURL(blob);
    audio.src = url;
    audio.hidden = false;
    for (const column of columns) { column.querySelector(".text").textContent = ""; column.querySelector(".time").textContent = ""; }
    say("transcribing ...");
    let sent;
    try { sent = await toWav(blob); } catch { say("this browser cannot decode the file"); return; }
    const texts = [];
    for (const column of columns) {
      try {
        const { text, took } = await ask(column.dataset.model, sent.wav);
        if (mine !== turn) return;
        texts.push(text);
        show(column, text || "(nothing heard)", texts.length > 1 ? texts[0] : null);
        column.querySelector(".time").textContent = `${sent.seconds.toFixed(1)} s of audio in ${took.toFixed(2)} s`;
      } catch (error) {
        if (mine !== turn) return;
        column.querySelector(".text").textContent = `error: ${error.message}`;
        texts.push("");
      }
    }
    say("");
  }

  record.addEventListener("click", async () => {
    if (recorder) { recorder.stop(); return; }
    if (!navigator.mediaDevices) { say("the browser gives the microphone to this machine's own address and to https only"); return; }
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const parts = [];
      recorder = new MediaRecorder(stream);
      recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
      recorder.addEventListener("stop", () => {
        stream.getTracks().forEach((track) => track.stop());
        const type = recorder.mimeType;
        recorder = null;
        record.textContent = "Record";
        record.setAttribute("aria-pressed", "false");
        transcribe(new Blob(parts, { type }));
      });
      recorder.start();
      record.textContent = "Stop";
      record.setAttribute("aria-pressed", "true");
      say("recording ...");
    } catch (error) { recorder = null; say(`no microphone: ${error.message}`); }
  });
  byId("keyed").addEventListener("submit", (event) => event.preventDefault());
  file.addEventListener("change", () => { if (file.files.length) transcribe(file.files[0]); file.value = ""; });
})();
