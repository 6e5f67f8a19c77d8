"""Each family that transformers has a class for, out and back: the same weights and texts. The archives are small, and
as NVIDIA publishes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import read_lines, slow, write_manifest

from finetune.errors import UserError
from finetune.models.loading import load_model
from finetune.tools.export.equal_texts import same_text

CLIPS = 4
# Family, head, the class of transformers, the NeMo class on the way back.
WAYS = [
    ("hybrid-tdt", "ctc", "ParakeetForCTC", "EncDecCTCModelBPE"),
    ("streaming", None, "NemotronAsrStreamingForRNNT", "EncDecRNNTBPEModel"),
]
SLOW_WAYS = [
    ("rnnt", None, "ParakeetForRNNT", "EncDecRNNTBPEModel"),
    ("prompt", None, "Nemotron3_5AsrForRNNT", "EncDecRNNTBPEModelWithPrompt"),
    ("ctc", None, "ParakeetForCTC", "EncDecCTCModelBPE"),
    ("hybrid-tdt", None, "ParakeetForTDT", "EncDecRNNTBPEModel"),
    ("hybrid-rnnt", "transducer", "ParakeetForRNNT", "EncDecRNNTBPEModel"),
    ("hybrid-rnnt", "ctc", "ParakeetForCTC", "EncDecCTCModelBPE"),
    ("streaming-eou", None, "NemotronAsrStreamingForRNNT", "EncDecRNNTBPEModel"),
    ("streaming-hybrid", None, "NemotronAsrStreamingForRNNT", "EncDecRNNTBPEModel"),
    ("unified", None, "ParakeetForRNNT", "EncDecRNNTBPEModel"),
    ("tdt", None, "ParakeetForTDT", "EncDecRNNTBPEModel"),
]


@pytest.fixture(scope="module")
def archive(archive_of: Callable[..., Path]) -> Callable[[str], Path]:
    """`archive("rnnt")` builds a family's archive once and returns its path."""
    # 13,087 pieces take a minute.
    return lambda name: archive_of(name, "plain" if name == "prompt" else None, speaking=True)


@pytest.fixture(scope="module")
def speech(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of a few clips of different length."""
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    return write_manifest(tmp_path_factory.mktemp("speech") / "few.jsonl", rows[:CLIPS])


@pytest.fixture(scope="module")
def exported(
    archive: Callable[[str], Path], speech: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, str]]:
    """`exported(family, head)` exports a family once and returns the directory and what the command prints."""
    from finetune.tools.export.hugging_face import export_hugging_face

    folder, done = tmp_path_factory.mktemp("exported"), {}

    def export(name: str, head: str | None = None) -> tuple[Path, str]:
        if (name, head) not in done:
            path = folder / f"{name}-{head}"
            done[name, head] = path, export_hugging_face(str(archive(name)), path, data=[str(speech)], head=head)
        return done[name, head]

    return export


def there_and_back(exported: Any, archive: Any, name: str, head: str | None, there: str, back: str) -> None:
    """The export compares numbers and texts itself, and refuses what is not the same."""
    directory, told = exported(name, head)
    assert f"({there}, " in told
    assert f"texts equal, {CLIPS} not empty" in told
    assert ("left out: " in told) is name.startswith(("hybrid", "streaming-hybrid"))
    assert json.loads((directory / "config.json").read_text())["architectures"] == [there]
    original, again = load_model(str(archive(name))), load_model(str(directory))
    assert type(again).__name__ == back
    ours, theirs = original.state_dict(), again.state_dict()
    if head == "ctc" and hasattr(original, "ctc_decoder"):
        ours = {
            key.replace("ctc_decoder.", "decoder."): tensor
            for key, tensor in ours.items()
            if not key.startswith(("decoder.", "joint."))
        }
    else:
        ours = {key: tensor for key, tensor in ours.items() if not key.startswith("ctc_decoder.")}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for part in ("encoder", "preprocessor"):
        assert again.cfg[part] == original.cfg[part], part
    if head != "ctc" and back != "EncDecCTCModelBPE":
        assert again.cfg.loss == original.cfg.loss
        assert again.cfg.model_defaults == original.cfg.model_defaults


@pytest.mark.parametrize(("name", "head", "there", "back"), WAYS)
def test_there_and_back_nothing_changes(exported, archive, name, head, there, back):
    there_and_back(exported, archive, name, head, there, back)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head", "there", "back"), SLOW_WAYS)
def test_so_it_is_for_the_other_families(exported, archive, name, head, there, back):
    there_and_back(exported, archive, name, head, there, back)


@pytest.mark.parametrize(("name", "head", "batch"), [("rnnt", None, 3), ("hybrid-tdt", "ctc", 1)])
def test_the_pipeline_gives_nemos_texts(exported, name, head, batch, speech):
    """The pipeline of a CTC model decodes the padding of a batch too, which `generate` does not."""
    from transformers import pipeline

    from finetune.evaluation.recognise import evaluation_mode, recognise_batch

    directory, _ = exported(name, head)
    audio = [soundfile.read(row["audio_filepath"], dtype="float32")[0] for row in read_lines(speech)]
    recognise = pipeline("automatic-speech-recognition", model=str(directory), device="cpu")
    ours = [r["text"] for r in recognise([{"raw": a, "sampling_rate": 16_000} for a in audio], batch_size=batch)]
    nemo = load_model(str(directory))
    audio_BS = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in audio], batch_first=True)
    with evaluation_mode(nemo):
        theirs = [h.text for h in recognise_batch(nemo, audio_BS, torch.tensor([len(a) for a in audio]))]
    assert [same_text(*pair) for pair in zip(ours, theirs, strict=True)] == [True] * CLIPS, (ours, theirs)
    assert len(set(theirs)) > 1


REFUSED = [
    ("conformer-rnnt", None, ["ParakeetForRNNT", "encoder.subsampling: 'striding'"]),
    ("long-rnnt", None, ["encoder.self_attention_model: 'rel_pos_local_attn'"]),
    ("stateless-tdt", None, ["ParakeetForTDT", "StatelessTransducerDecoder is no RNNTDecoder"]),
    (
        "streaming-hybrid",
        "ctc",
        ["ParakeetForCTC", "encoder.causal_downsampling: True", "preprocessor.normalize: 'NA'"],
    ),
]


@pytest.mark.parametrize(("name", "head", "words"), REFUSED)
def test_what_no_class_expresses_is_named(archive, name, head, words):
    from finetune.models.huggingface.writing import check_expressible, head_of_hybrid
    from finetune.models.nemo_archive import read_nemo

    with pytest.raises(UserError, match="cannot be expressed as transformers'") as found:
        check_expressible(head_of_hybrid(read_nemo(archive(name)), head)[0])
    for word in words:
        assert word in str(found.value)


def test_a_head_that_the_model_lacks(archive):
    from finetune.models.huggingface.writing import head_of_hybrid
    from finetune.models.nemo_archive import read_nemo

    with pytest.raises(UserError, match=r"--head ctc: .*rnnt.*\.nemo has only a transducer"):
        head_of_hybrid(read_nemo(archive("rnnt")), "ctc")


def test_a_streaming_encoder_with_two_left_contexts(archive):
    from finetune.models.huggingface.layout import kind_of, reasons_against
    from finetune.models.nemo_archive import read_nemo

    nemo = read_nemo(archive("streaming"))
    nemo.config["encoder"]["att_context_size"] = [[70, 13], [140, 13]]
    nemo.config["preprocessor"]["normalize"] = "per_feature"
    said = "\n".join(reasons_against(nemo.config, nemo.weights, kind_of(nemo.config), nemo.tokens))
    assert "encoder.att_context_size: [[70, 13], [140, 13]]; transformers has one limited left context" in said
    assert "preprocessor.normalize: 'per_feature'; transformers has only 'NA'" in said


def as_published(directory: Path, folder: Path, tokens: int, pad: bool) -> Path:
    """Return a copy with the files that NVIDIA publishes, whose tokenizers have `<pad>` in the blank's place."""
    names = ("config.json", "model.safetensors", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
    folder.mkdir()
    for name in names:
        shutil.copy(directory / name, folder)
    if pad:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (blank,) = [t for t in tokenizer["added_tokens"] if t["id"] == tokens]
        blank["content"] = "<pad>"
        tokenizer["added_tokens"].append({**blank, "content": "<blank>", "id": tokens + 1})
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize(("name", "head"), [*(way[:2] for way in WAYS), *(slow(*way[:2]) for way in SLOW_WAYS[:2])])
def test_the_published_files_are_enough(exported, archive, name, head, tmp_path, messages):
    directory, _ = exported(name, head)
    original = load_model(str(archive(name)))
    tokens = original.tokenizer.vocab_size
    bare = as_published(directory, tmp_path / "bare", tokens, pad=name != "rnnt")
    model = load_model(str(bare))
    ours, theirs = load_model(str(directory)).state_dict(), model.state_dict()
    # The recipe has dropout in the joint, which moves its last layer one place on.
    assert sorted(t.sum().item() for t in ours.values()) == sorted(t.sum().item() for t in theirs.values())
    assert model.cfg.encoder.att_context_size == original.cfg.encoder.att_context_size
    assert model.cfg.preprocessor.normalize == original.cfg.preprocessor.normalize
    text = "press 1 then speak"
    assert model.tokenizer.text_to_ids(text) == original.tokenizer.text_to_ids(text)
    said = "\n".join(messages)
    assert "it has no nemo_config.yaml" in said
    assert ("fastemit 0.005" in said) is (name in ("streaming", "prompt"))


def test_a_directory_of_ctc_with_files_missing(exported, tmp_path):
    directory, _ = exported("hybrid-tdt", "ctc")
    for name, said in (
        ("model.safetensors", r"model\.safetensors cannot be read"),
        ("tokenizer.json", r"has no tokenizer\.json"),
        ("processor_config.json", r"has no processor_config\.json"),
        ("config.json", r"no config\.json"),
    ):
        copy = shutil.copytree(directory, tmp_path / name)
        (copy / name).unlink()
        with pytest.raises(UserError, match=said):
            load_model(str(copy))


def chunks_of(processor: Any, audio_S: torch.Tensor, frames: list[int]) -> Any:
    """Yield the features of each chunk, as transformers' documentation makes them: the frames that are named."""
    features, rate = processor.feature_extractor, processor.feature_extractor.sampling_rate
    position, size = 0, processor.num_samples_first_audio_chunk
    for count in frames:
        first = position == 0
        start = 0 if first else features.hop_length * position - features.n_fft // 2
        inputs = processor(
            audio_S[start : start + size].numpy(), sampling_rate=rate, is_streaming=True, is_first_audio_chunk=first
        )
        yield inputs["input_features"][:, :count]
        position, size = position + count, processor.num_samples_per_audio_chunk


@pytest.mark.parametrize("look_ahead", [13, 1])
def test_transformers_streams_what_nemo_streams(exported, archive, look_ahead):
    """The texts of the first chunks: at the end of a recording, NeMo hears a frame more than transformers."""
    from transformers import AutoModelForRNNT, AutoProcessor

    from finetune.evaluation.recognise import evaluation_mode
    from finetune.evaluation.streaming import stream, texts_of

    directory, _ = exported("streaming")
    model, processor = AutoModelForRNNT.from_pretrained(directory), AutoProcessor.from_pretrained(directory)
    processor.set_num_lookahead_tokens(look_ahead)
    audio_S = 0.1 * torch.randn(6 * 16_000, generator=torch.Generator().manual_seed(0))
    nemo, heard = load_model(str(archive("streaming"))), 4
    with evaluation_mode(nemo):
        steps = stream(nemo, audio_S[None], torch.tensor([len(audio_S)]), (70, look_ahead))
        hypotheses = [next(steps).hypotheses for _ in range(heard)][-1]
        (theirs,) = texts_of(nemo, hypotheses)
    first, later = processor.num_mel_frames_first_audio_chunk, processor.num_mel_frames_per_audio_chunk
    chunks = chunks_of(processor, audio_S, [first] + [later] * (heard - 1))
    output = model.generate(input_features=chunks, num_lookahead_tokens=look_ahead)
    (ours,) = processor.batch_decode(output.sequences, skip_special_tokens=True)
    assert ours == theirs
    assert len(theirs) > 10


def test_language_tags_that_nemo_takes_out_are_special_in_transformers(tmp_path):
    """And pieces again on the way back, as nemotron-3.5 has them."""
    import families

    from finetune.models.huggingface.layout import language_tags
    from finetune.models.huggingface.tokenizer import processor_tokenizer, sentencepiece_of
    from finetune.models.sentencepiece_model import USER_DEFINED, parse, processor

    folder = families.make_tokenizer("end_of_utterance", families.sample_texts(), tmp_path / "tokenizer")
    proto = parse((folder / "tokenizer.model").read_bytes(), "tokenizer")
    proto.pieces[-1].piece = "<en-US>"
    ids = [*processor(proto).encode("hello"), len(proto.pieces) - 1]
    decoded = {}
    for stripped in (False, True):
        left_out = language_tags({"decoding": {"strip_lang_tags": stripped}})
        tokenizer = processor_tokenizer(proto, left_out=left_out)
        decoded[stripped] = tokenizer.decode(ids, skip_special_tokens=True, group_tokens=False)
        tokenizer.save_pretrained(tmp_path / str(stripped))
    assert decoded == {False: "hello<en-US>", True: "hello"}
    content, _ = sentencepiece_of(tmp_path / "True", len(proto.pieces))
    again = parse(content, "again").pieces[-1]
    assert (again.piece, again.type) == ("<en-US>", USER_DEFINED)
