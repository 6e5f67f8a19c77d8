#!/usr/bin/env python3
"""Build examples/voice_prompts: English and French studio telephone prompts as parquet shards.

Source: the Debian packages asterisk-core-sounds-{en,fr} (transcripts) and asterisk-core-sounds-{en,fr}-g722
(audio, 16 kHz), CC BY-SA 3.0. Needs ffmpeg to decode G.722.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sample_data as sd

SOUNDS = {"en": "en_US_f_Allison", "fr": "fr_CA_f_June"}
SPLITS = ("train", "validation", "test")
TEST_SHARE, VALIDATION_SHARE = 0.135, 0.08  # of the hash range
MIN_SECONDS, MAX_SECONDS = 0.25, 20.0
MAX_LETTERS_PER_SECOND = 24.0  # faster than anyone speaks: the transcript is not that of the recording
SILENCE_DB = -42.0  # against the clip's loudest 20 ms
PAD_SECONDS = 0.15  # silence kept at either end
OPUS_COMPRESSION = 0.88  # of 0..1 (libsndfile): about 37 kbit/s at 16 kHz

# Not speech, or a transcript known not to be what is said.
LEFT_OUT = {
    "en": {"spy-h323", "spy-iax", "spy-iax2", "spy-dahdi"},
    "fr": {"spy-h323", "spy-iax2", "spy-dahdi", "demo-moreinfo", "vm-mismatch"},
}
# Repairs of single lines, where the transcript is plainly wrong.
LINE_REPAIRS = {
    ("fr", "digits/h-80"): "quatre-vingtième",
    ("fr", "calling"): "téléphoner",
    ("en", "digits/a-m"): "A M",
    ("en", "digits/p-m"): "P M",
    ("fr", "digits/a-m"): "A M",
    ("fr", "digits/p-m"): "P M",
    ("en", "demo-moreinfo"): (
        "Asterisk is an open source full-featured P B X and I V R platform that runs on the linux operating system. "
        "For more information, visit w w w dot asterisk dot org."
    ),
}
# Spelling mistakes that do not change what is said, and signs written for words.
WORD_REPAIRS = {
    "en": {
        "umute": "unmute", "fourtieth": "fortieth", "represenatives": "representatives", "thru": "through",
        "indentified": "identified", "witheld": "withheld", "IAX": "I A X",
        "USB": "U S B", "MGCP": "M G C P", "PBX": "P B X", "IVR": "I V R", "IP": "I P", "i": "I", "xray": "x-ray",
    },
    "fr": {
        "présentemnet": "présentement", "presentement": "présentement", "vérrouiller": "verrouiller",
        "vérouiller": "verrouiller", "dévérouiller": "déverrouiller", "dévérouillée": "déverrouillée",
        "verouillée": "verrouillée", "vérouillée": "verrouillée", "déverouillée": "déverrouillée",
        "Felicitation": "Félicitations", "connection": "connexion", "etes": "êtes", "etez": "êtes",
        "démontration": "démonstration", "premieres": "premières", "essai": "essaie", "Aurevoir": "Au revoir",
        "Allo": "Allô", "reessayer": "réessayer", "desirez": "désirez",
        "boite": "boîte", "autorise": "autorisé", "etait": "était", "occupes": "occupés",
        "appellant": "appelant", "Enleve": "Enlevé", "simultane": "simultané", "ete": "été", "Desole": "Désolé",
        "desolé": "désolés", "abregée": "abrégée", "Numero": "Numéro", "numero": "numéro", "telephone": "téléphone",
        "ecouter": "écouter", "rappler": "rappelé", "etre": "être",
        "établi": "établis", "répétér": "répéter", "acceuil": "accueil", "status": "statut",
        "echo": "écho", "hotel": "hôtel", "quebec": "québec", "conctact": "contacte", "étez": "été",
        "IAX": "I A X", "IP": "I P", "entendue": "entendu", "étés": "été", "somme": "sommes", "arrivé": "arrivée",
        "laissez": "laisser", "problemes": "problèmes", "Pous": "Pour",
        "remplacerà": "remplacera", "seixième": "seizième", "xray": "x-ray",
    },
}  # fmt: skip
PHRASE_REPAIRS = {
    "en": [("separated by *", "separated by star"), ("press *", "press star"), ("press #", "press pound"),
           ("followed by #", "followed by pound"), ("just #", "just pound"),
           ("3D", "three D"), ("exclaimation-point", "exclamation point")],
    "fr": [("sur *", "sur étoile"), ("sur #", "sur dièse"), ("3D", "trois D"), ("ce tte", "cette"),
           ("options:P", "options: P"), (" et et ", " et "), ("votre votre", "votre"),
           ("Mise a jour", "Mise à jour"), ("A l'extension", "À l'extension"),
           ("a partir", "à partir"), ("a nouveau", "à nouveau"), ("a votre", "à votre"), ("a l'avenir", "à l'avenir"),
           ("a joindre", "à joindre"), ("Si desirez", "Si vous désirez")],
}  # fmt: skip
ENGLISH_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
FRENCH_NUMBERS = ["zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"]


def clean_text(name: str, text: str, language: str) -> str | None:
    """Transcript as spoken, or None where the line is no speech or its text cannot be trusted.

    Drops notes in brackets, writes digits and signs as words and mends plain spelling mistakes; case and
    punctuation stay.
    """
    if name in LEFT_OUT[language] or name.startswith("silence/"):
        return None
    text = LINE_REPAIRS.get((language, name), text)
    text = re.sub(r"vm-[a-z-]+:.*$", "", text)  # two lines of the source run into one
    if "(ne m'appelez" not in text:  # the one note in round brackets that is spoken
        text = re.sub(r"\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]|<[^>]*>", " ", text)
    for old, new in PHRASE_REPAIRS[language]:
        text = text.replace(old, new)
    for old, new in WORD_REPAIRS[language].items():
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
    numbers = ENGLISH_NUMBERS if language == "en" else FRENCH_NUMBERS
    text = re.sub(r"(?<!\w)(\d)(?!\w)", lambda m: numbers[int(m.group(1))], text)
    text = text.replace("“", "").replace("”", "").replace('"', "").replace("…", "...").replace("...", " ")
    text = re.sub(r"([,;:])(?=\s*[.,;:])", "", text)
    text = re.sub(r"\.(?=[A-ZÀ-Ý])", ". ", text)
    text = re.sub(r"\s+([.,])", r"\1", " ".join(text.split())).strip(" ,")
    if not sd.normalise_text(text) or re.search(r"[\d#*@<>\[\]()/]", text.replace("(ne", "").replace("jamais)", "")):
        return None
    return text.replace("(", "").replace(")", "")


def split_of(text: str) -> str:
    """Split of a text, fixed by the SHA-256 of its normalised form: equal texts always fall together."""
    value = int.from_bytes(hashlib.sha256(sd.split_key(text).encode()).digest()[:8], "big") / 2**64
    if value < TEST_SHARE:
        return "test"
    return "validation" if value < TEST_SHARE + VALIDATION_SHARE else "train"


def read_transcripts(path: Path) -> list[tuple[str, str]]:
    """(name, text) of each line 'name: text'; lines that begin with ';' are comments."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        pairs = [line.split(":", 1) for line in lines if ":" in line and not line.startswith(";")]
    return [(name.strip(), text.strip()) for name, text in pairs]


def decode_g722(path: Path) -> np.ndarray:
    """Samples (float32, mono, 16 kHz) of a headerless G.722 file."""
    command = ["ffmpeg", "-v", "error", "-f", "g722", "-i", str(path), "-f", "s16le", "-ac", "1"]
    result = subprocess.run([*command, "-ar", str(sd.SAMPLE_RATE), "-"], capture_output=True, check=False)
    if result.returncode:
        raise RuntimeError(f"ffmpeg could not decode {path}: {result.stderr.decode(errors='replace').strip()}")
    return np.frombuffer(result.stdout, dtype="<i2").astype(np.float32) / 32768.0


def trim_silence(samples: np.ndarray) -> np.ndarray:
    """Cut leading and trailing silence, leaving PAD_SECONDS at either end."""
    frame = sd.SAMPLE_RATE // 50
    count = len(samples) // frame
    if count < 3:
        return samples
    power = (samples[: count * frame].reshape(count, frame) ** 2).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 10 ** (SILENCE_DB / 10))
    pad = int(PAD_SECONDS * sd.SAMPLE_RATE)
    return samples[max(0, loud[0] * frame - pad) : (loud[-1] + 1) * frame + pad]


def make_row(language: str, name: str, text: str, audio: Path) -> dict[str, Any] | None:
    """One row of the data set, or None where the audio is missing, too long or does not fit the text."""
    if not audio.is_file():
        return None
    samples = trim_silence(decode_g722(audio))
    seconds = len(samples) / sd.SAMPLE_RATE
    if not MIN_SECONDS <= seconds <= MAX_SECONDS or len(text) > MAX_LETTERS_PER_SECOND * seconds:
        return None
    data = sd.encode_audio(samples, "OGG", "OPUS", compression_level=OPUS_COMPRESSION)
    decoded, _ = sd.decode_audio(data)
    row_id = f"{language}-{name.replace('/', '-')}"
    return {
        "id": row_id,
        "audio": {"bytes": data, "path": f"{row_id}.opus"},
        "text": text,
        "language": language,
        "duration": len(decoded) / sd.SAMPLE_RATE,
    }


def build(sounds: Path, documents: Path, jobs: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of every split."""
    tasks = []
    for language, folder in SOUNDS.items():
        listing = documents / f"asterisk-core-sounds-{language}" / f"core-sounds-{language}.txt.gz"
        for path, package in ((listing, f"asterisk-core-sounds-{language}"),
                              (sounds / folder / "hello.g722", f"asterisk-core-sounds-{language}-g722")):  # fmt: skip
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: apt-get install {package}")
        for name, text in read_transcripts(listing):
            cleaned = clean_text(name, text, language)
            if cleaned:
                tasks.append((language, name, cleaned, sounds / folder / f"{name}.g722"))
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    with ThreadPoolExecutor(jobs) as pool:
        made = tqdm(pool.map(lambda task: make_row(*task), tasks), total=len(tasks), desc="prompts", unit="clip")
        for row in made:
            if row is not None:
                rows[split_of(row["text"])].append(row)
    return rows


def print_statistics(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Print a markdown table of clips, minutes and words a split and language."""
    print("| split | language | clips | minutes | words |\n|---|---|---:|---:|---:|")
    for split, items in rows.items():
        for language in SOUNDS:
            part = [row for row in items if row["language"] == language]
            words = sum(len(sd.normalise_text(row["text"]).split()) for row in part)
            minutes = sum(row["duration"] for row in part) / 60
            print(f"| {split} | {language} | {len(part)} | {minutes:.1f} | {words} |")


def main() -> None:
    """Command line."""
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=root / "examples" / "voice_prompts", help="data set folder")
    parser.add_argument("--sounds", type=Path, default=Path("/usr/share/asterisk/sounds"), help="Asterisk's sounds")
    parser.add_argument("--documents", type=Path, default=Path("/usr/share/doc"), help="where the transcripts are")
    parser.add_argument("--train-shards", type=int, default=3, help="number of train shards")
    parser.add_argument("--jobs", type=int, default=2, help="decoders at once")
    args = parser.parse_args()
    if shutil.which("ffmpeg") is None:
        raise SystemExit("ffmpeg is missing: apt-get install ffmpeg")
    try:
        rows = build(args.sounds, args.documents, args.jobs)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
    data = args.output / "data"
    sd.remove_shards(data, SPLITS)
    for split, items in rows.items():
        count = args.train_shards if split == "train" else 1
        for index in range(count):
            sd.write_shard(sd.shard_path(data, split, index, count), items[index::count])
    print_statistics(rows)
    size = sum(path.stat().st_size for path in data.glob("*.parquet"))
    print(f"{size / 1e6:.1f} MB under {data}")


if __name__ == "__main__":
    main()
