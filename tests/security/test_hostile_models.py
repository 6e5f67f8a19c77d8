"""Models from elsewhere: archives, pickles, configurations and Hugging Face directories that were made to do harm are
refused, and do none."""

import contextlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TOKENIZER, tiny_layout
from hostile_files import bomb, evil_torch_file, member, members_of, write_archive

from finetune.errors import UserError
from finetune.models.huggingface.writing import write_hugging_face
from finetune.models.loading import load_model, read_tokenizer
from finetune.models.nemo_archive import (
    ADAPTERS,
    MODELS,
    PARTS,
    check_model_config,
    load_weights,
    read_config,
    read_nemo,
)
from finetune.security.archives import unpack
from finetune.tools.planning.layout import read_layout
from finetune.tools.publishing.private import private_parts, read_nemo_config

READERS = {
    "plan": lambda path: read_layout(str(path)),
    "export": read_nemo,
    "tokenizer": lambda path: read_tokenizer(str(path), "--against"),
    "share": read_nemo_config,
    "train": lambda path: load_model(str(path)),
}


@pytest.fixture
def files(tiny_model: Path) -> dict[str, bytes]:
    """What is in a good .nemo."""
    return members_of(tiny_model)


def sparse() -> tarfile.TarInfo:
    info = member("holes", size=512)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "x",
        "GNU.sparse.realsize": str(2**50),
    }
    return info


EVIL_MEMBERS = {
    "absolute": (member("/tmp/evil"), "'/tmp/evil' would be written outside"),
    "climbing": (member("a/../../evil"), r"'a/../../evil' would be written outside"),
    "symbolic link": (member("link", tarfile.SYMTYPE, "/etc"), "'link' is a symbolic link"),
    "hard link": (member("hard", tarfile.LNKTYPE, "../../etc/passwd"), "'hard' is a hard link"),
    "device": (member("zero", tarfile.CHRTYPE), "'zero' is a device"),
    "pipe": (member("pipe", tarfile.FIFOTYPE), "'pipe' is a pipe"),
    "escape": (member("a\x1b[2Jb"), r"'a\\\\x1b\[2Jb' is no name of a file"),
    "twice": (member("./model_config.yaml"), "model_config.yaml' is in it twice"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", EVIL_MEMBERS)
def test_an_archive_with_such_a_member_is_refused_before_anything_is_unpacked(
    kind, reader, files, tmp_path, monkeypatch
):
    evil, said = EVIL_MEMBERS[kind]
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    monkeypatch.setattr("tempfile.tempdir", str(inside))
    monkeypatch.setattr(tarfile.TarFile, "extract", None)  # whoever unpacks fails
    monkeypatch.setattr(tarfile.TarFile, "extractall", None)
    bad = write_archive(tmp_path / "bad.nemo", files, evil)
    with pytest.raises(UserError, match=rf"bad\.nemo is refused: .*{said}.*Nothing of it was unpacked") as refused:
        READERS[reader](bad)
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["bad.nemo", "inside"]


def test_archives_that_grow(files, tmp_path):
    """Sizes that are announced, sizes that come, thousands of members, headers without end, and a size below zero,
    which tarfile goes in circles on."""
    with pytest.raises(UserError, match=r"bomb\.nemo is refused: it unpacks to more than .* bytes"):
        read_config(bomb(tmp_path / "bomb.nemo", 128))
    huge = write_archive(tmp_path / "huge.nemo", files, member("big", size=2**40))
    with pytest.raises(
        UserError, match=r"'big' says that it has 1,099,511,627,776 bytes, and the archive ends before them"
    ):
        read_config(huge)
    many = write_archive(tmp_path / "many.nemo", files, *(member(f"m{i}") for i in range(3000)))
    with pytest.raises(UserError, match="more than 2,000 members"):
        read_config(many)
    long = write_archive(tmp_path / "long.nemo", {}, member("x" * 5_000_000))
    with pytest.raises(UserError, match="its headers have more than"):
        read_config(long)
    head = bytearray(member("back").tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" * 11 + b"\x00"  # -256 in base 256
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head[:512])
    (tmp_path / "back.nemo").write_bytes(bytes(head) + bytes(1024))
    with pytest.raises(UserError, match=r"'back' says that it has -\d+ bytes"):
        read_config(tmp_path / "back.nemo")
    with pytest.raises(UserError, match="holes"):
        read_config(write_archive(tmp_path / "sparse.nemo", files, sparse()))


def test_unpack_writes_what_is_there_and_nothing_beside_it(files, tmp_path):
    (tmp_path / "out").mkdir()
    unpack(write_archive(tmp_path / "good.nemo", files, mode="w:gz"), tmp_path / "out", "model.name")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        Path(k).name: v for k, v in files.items()
    }


@pytest.mark.parametrize("reader", ["export", "train", "weights"])
def test_code_in_the_weights_of_an_archive_is_not_run(reader, files, tiny_model, tmp_path, monkeypatch):
    """Not with torch's own switch in the environment that turns its protection off either."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark = tmp_path / "mark"
    name = next(n for n in files if n.endswith("model_weights.ckpt"))
    bad = write_archive(tmp_path / "bad.nemo", {**files, name: evil_torch_file(mark)})
    torch.load(io.BytesIO(files[name]))  # the switch is on: this is the full unpickler
    model = load_model(str(tiny_model)) if reader == "weights" else None
    with pytest.raises(UserError, match=r"it would run posix\.mkdir"):
        load_weights(model, bad) if reader == "weights" else READERS[reader](bad)
    assert not mark.exists()


def edited(files: dict[str, bytes], change: Any) -> dict[str, bytes]:
    """The archive's files with another configuration."""
    name = next(n for n in files if n.endswith("model_config.yaml"))
    config = yaml.safe_load(files[name])
    change(config)
    return {**files, name: yaml.safe_dump(config).encode()}


AUTO = "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer"
CONFIGS = {
    "function": (
        lambda c: c["encoder"].update(_target_="os.system", command="touch mark"),
        r"encoder\._target_: 'os\.system' is refused",
    ),
    "method": (
        lambda c: c["decoder"].update(_target_="nemo.collections.asr.models.ASRModel.restore_from", restore_path="x"),
        r"decoder\._target_: .*restore_from' is refused",
    ),
    "module of nemo": (lambda c: c["joint"].update(_target_="nemo.utils.exp_manager.exp_manager"), r"joint\._target_"),
    "deep": (
        lambda c: c.update(adapters={"a": [{"b": {"_target_": "subprocess.Popen"}}]}),
        r"adapters\.a\[0\]\.b\._target_",
    ),
    "class of the model": (lambda c: c.update(target="builtins.exec"), r"target: 'builtins\.exec' is refused"),
    "environment": (
        lambda c: c["encoder"].update(dropout="${oc.env:HF_TOKEN}"),
        r"encoder\.dropout: .*oc\.env:HF_TOKEN.* is refused",
    ),
    "computed name": (
        lambda c: c["encoder"].update(dropout="${${sample_rate}:x}"),
        r"encoder\.dropout: .* is refused",
    ),
    "code from a hub": (
        lambda c: c["preprocessor"].update(
            extra={"_target_": AUTO, "pretrained_model_name": "evil", "trust_remote_code": True}
        ),
        r"preprocessor\.extra\._target_: .*AutoTokenizer' is refused: NeMo's no class may stand here",
    ),
    "in the place of a part": (
        lambda c: c["encoder"].update(_target_=AUTO),
        r"encoder\._target_: .* is refused: NeMo's ConformerEncoder or ConformerEncoderAdapter may stand here",
    ),
    "a tokenizer's class": (
        lambda c: c["tokenizer"].update(custom_tokenizer={"_target_": AUTO}),
        r"tokenizer\.custom_tokenizer\._target_: ",
    ),
    "a tokenizer's code": (
        lambda c: c["tokenizer"].update(hf_kwargs={"trust_remote_code": True}),
        r"tokenizer\.hf_kwargs\.trust_remote_code is refused",
    ),
    "a part within a part": (
        lambda c: c["encoder"].update(more=dict(c["encoder"])),
        r"encoder\.more\._target_: .* is refused",
    ),
    "old form": (
        lambda c: c.update(encoder={"cls": c["encoder"].pop("_target_"), "params": {"_target_": AUTO}}),
        r"encoder\.params\._target_: .* is refused",
    ),
    "a model that loads another": (
        lambda c: c.update(target="nemo.collections.asr.models.SLUIntentSlotBPEModel"),
        r"is a SLUIntentSlotBPEModel, which is not supported",
    ),
    # With a class for the whole, or params, NeMo builds what is below sections that otherwise only training reads.
    "a class of the whole": (
        lambda c: c.update(_target_=c["target"], train_ds={"_target_": AUTO}),
        r"model_config\.yaml: _target_: is refused",
    ),
    "params of the whole": (lambda c: c.update(params={}, train_ds={"_target_": AUTO}), "params: is refused"),
    "another model within": (
        lambda c: c.update(model={"encoder": {"d_model": 2**20, "n_layers": 1000}}),
        r"model_config\.yaml: model: is refused",
    ),
    "in a list of labels": (
        lambda c: c["encoder"].update(vocabulary=["a", {"_target_": "os.system"}]),
        r"encoder\.vocabulary\[1\]\._target_: 'os\.system' is refused",
    ),
    "reference in two parts": (
        lambda c: c.update(a="$", b="${a}{oc.env:HF_TOKEN}"),
        r"b: .* is refused: a reference is",
    ),
    "reference from an escape": (lambda c: c.update(b="\\${oc.env:HF_TOKEN}"), r"b: .* is refused: a reference is"),
    "a device": (lambda c: c["tokenizer"].update(vocab_path="/dev/zero"), r"vocab_path: '/dev/zero' is a file"),
    "a directory": (lambda c: c["tokenizer"].update(vocab_path="/usr/lib"), r"vocab_path: '/usr/lib' is a file"),
    "a file beside": (lambda c: c["tokenizer"].update(vocab_path="bad.nemo"), r"vocab_path: 'bad.nemo' is a file"),
    "climbing file": (
        lambda c: c["tokenizer"].update(vocab_path="nemo:../../etc/passwd"),
        r"tokenizer\.vocab_path: there is no",
    ),
    "file of this machine": (
        lambda c: c["tokenizer"].update(vocab_path="/etc/passwd"),
        r"tokenizer\.vocab_path: '/etc/passwd' is a file",
    ),
    "language model": (
        lambda c: c["decoding"].update(greedy={"ngram_lm_model": "/etc/passwd"}),
        r"ngram_lm_model: '/etc/passwd'",
    ),
    "size": (
        lambda c: c["encoder"].update(n_layers=10**6, d_model=65536),
        r"describes a model of more than .* parameters",
    ),
    "references": (
        lambda c: c.update({f"a{i}": f"${{a{i + 1}}}${{a{i + 1}}}" for i in range(60)}, a60="x" * 10),
        "references come to more than",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_would_do_more_than_build_a_model_is_refused(kind, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_plantedsecret")
    change, said = CONFIGS[kind]
    bad = write_archive(tmp_path / "bad.nemo", edited(files, change))
    for reader in ("train", "export", "plan"):
        with pytest.raises(UserError, match=said) as refused:
            READERS[reader](bad)
        assert "hf_plantedsecret" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.nemo"]


def test_a_layout_and_a_tag_are_refused_too(files, tmp_path):
    layout = tiny_layout()
    layout["model"]["encoder"]["_target_"] = "os.system"
    (tmp_path / "layout.yaml").write_text(yaml.safe_dump(layout))
    for read in (load_model, read_layout):
        with pytest.raises(UserError, match=r"model\.name: .*encoder\._target_: 'os\.system' is refused"):
            read(str(tmp_path / "layout.yaml"))
    name = next(n for n in files if n.endswith("model_config.yaml"))
    mark = tmp_path / "mark"
    tag = f"\nevil: !!python/object/apply:os.mkdir [{mark}]\n".encode()
    bad = write_archive(tmp_path / "bad.nemo", {**files, name: files[name] + tag})
    for reader in ("train", "export", "plan"):
        with pytest.raises(UserError, match=r"the tag .*os\.mkdir is refused"):
            READERS[reader](bad)
    with pytest.raises(UserError):
        private_parts(bad)
    assert not mark.exists()


def test_code_that_a_model_names_is_not_run(files, tmp_path, monkeypatch):
    """As published: NeMo's own class for tokenizers of a hub runs a file of that hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evilrepo").mkdir()
    (tmp_path / "evilrepo" / "evil.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\nclass Evil: ...\n"
    )
    (tmp_path / "evilrepo" / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    extra = {"_target_": AUTO, "pretrained_model_name": "evilrepo", "trust_remote_code": True}
    bad = write_archive(tmp_path / "bad.nemo", edited(files, lambda c: c["preprocessor"].update(extra=extra)))
    with pytest.raises(UserError, match="AutoTokenizer' is refused"):
        load_model(str(bad))
    assert not (tmp_path / "mark").exists()


def test_good_models_are_taken(tiny_model, files):
    check_model_config(read_config(tiny_model), "m", {Path(n).name for n in files})
    assert load_model(str(tiny_model)).tokenizer.vocab_size == 128


ASR = "nemo.collections.asr"


def published() -> dict[str, Any]:
    """What matters here of a published hybrid model's configuration, with an adapter, and sections of its training."""
    return {
        "target": f"{ASR}.models.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
        "labels": ["<unk>", "/", "./"],
        "train_ds": {"tarred_audio_filepaths": "/raid/a__OP_0..1_CL_.tar", "augmentor": None},
        "optim": {"name": "adamw", "sched": {"name": "CosineAnnealing"}},
        "preprocessor": {"_target_": f"{ASR}.modules.AudioToMelSpectrogramPreprocessor", "window": "hann"},
        "spec_augment": {"_target_": f"{ASR}.modules.audio_preprocessing.SpectrogramAugmentation"},
        "encoder": {"_target_": f"{ASR}.modules.conformer_encoder.ConformerEncoderAdapter", "reduction": None},
        "decoder": {"_target_": f"{ASR}.modules.RNNTDecoder", "prednet": {"dropout": 0.2}},
        "joint": {
            "_target_": f"{ASR}.modules.RNNTJoint",
            "vocabulary": ["<unk>", "/", "./"],
            "others": ["/", "./", "a/"],
        },
        "aux_ctc": {"decoder": {"_target_": f"{ASR}.modules.ConvASRDecoder", "vocabulary": ["/"]}},
        "loss": {"loss_name": "tdt", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.0}},
        "adapters": {
            "encoder:fr": {
                "_target_": "nemo.collections.common.parts.adapter_modules.LinearAdapter",
                "adapter_strategy": {
                    "_target_": "nemo.core.classes.mixins.adapter_mixin_strategies.ResidualAddAdapterStrategy"
                },
            }
        },
        "tokenizer": {"dir": str(TOKENIZER), "type": "bpe", "model_path": "nemo:1_tokenizer.model", "hf_kwargs": {}},
    }


def test_configurations_as_they_are_published_are_taken():
    check_model_config(published(), "m", {"1_tokenizer.model"})
    for known in ("rnnt_bpe_models.EncDecRNNTBPEModel", "EncDecRNNTBPEModel", "EncDecHybridRNNTCTCBPEModel"):
        check_model_config({**published(), "target": f"{ASR}.models.{known}"}, "m", {"1_tokenizer.model"})
    for name in ("fastconformer_tdt_3m", "parakeet_tdt_0.6b_v3"):
        read_layout(f"finetune/configs/models/{name}.yaml")
    read_config(Path("examples/base/fastconformer_tdt_3m.nemo"))
    # Every class that may be named is there in NeMo, and one that NeMo's own check lets through.
    from nemo.core.classes.common import _is_target_allowed

    named = {"target": MODELS, "adapters": ADAPTERS, **PARTS}
    found = {one for names in named.values() for one in names if _is_target_allowed(one)}
    missing = {one.rpartition(".")[2] for names in named.values() for one in names} - {
        one.rpartition(".")[2] for one in found
    }
    assert not missing


# ---- Hugging Face directories ---------------------------------------------------------------------------------------

CODE = "import os\nos.mkdir({mark!r})\nclass Evil:\n    pass\n"


def test_code_in_a_hugging_face_directory_is_not_run(tiny_model, tmp_path):
    """auto_map of model, tokenizer and processor name a file that leaves a mark where it is imported; a pickle lies
    there beside."""
    from finetune.models.huggingface.layout import KINDS
    from finetune.tools.export.equal_texts import load_written

    directory, mark = tmp_path / "hf", tmp_path / "mark"
    write_hugging_face(read_nemo(tiny_model), directory)
    (directory / "evil.py").write_text(CODE.format(mark=str(mark)))
    for file, keys in (
        ("config.json", ("AutoConfig", "AutoModelForTDT", "AutoModel")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
        ("processor_config.json", ("AutoProcessor", "AutoFeatureExtractor")),
    ):
        path = directory / file
        values = json.loads(path.read_text()) if path.is_file() else {}
        values["auto_map"] = dict.fromkeys(keys, "evil.Evil")
        path.write_text(json.dumps(values))
    (directory / "pytorch_model.bin").write_bytes(evil_torch_file(mark))
    assert load_model(str(directory)).tokenizer.vocab_size == 128
    read_tokenizer(str(directory), "--against")
    read_layout(str(directory))
    with contextlib.suppress(
        ValueError, OSError
    ):  # transformers may take its own class, or say no where it would have to run this one
        load_written(directory, torch.float32, KINDS["parakeet_tdt"])
    assert not mark.exists()
    (directory / "model.safetensors").rename(tmp_path / "kept.safetensors")
    with pytest.raises(UserError, match="Only safetensors files are taken"):
        load_model(str(directory))
    huge = json.loads((directory / "config.json").read_text())
    huge["encoder_config"].update(
        hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=1000, num_attention_heads=2
    )
    (tmp_path / "huge").mkdir()
    for file in directory.iterdir():
        shutil.copy(file, tmp_path / "huge" / file.name)
    (tmp_path / "huge" / "config.json").write_text(json.dumps(huge))
    shutil.copy(tmp_path / "kept.safetensors", tmp_path / "huge" / "model.safetensors")
    with pytest.raises(
        UserError, match=r"describes a model of more than [\d,]+ parameters, and it holds [\d,]+ bytes"
    ):
        load_model(str(tmp_path / "huge"))
    index = {"weight_map": {"a": "../../elsewhere.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="which is no file of its folder"):
        load_model(str(directory))
    assert not mark.exists()


def test_a_data_set_with_a_loading_script_is_not_run(clips, tmp_path):
    from finetune.data.sources import open_source, parse_sources

    folder, mark = tmp_path / "data", tmp_path / "mark"
    folder.mkdir()
    for name in ("data.py", "dataset.py"):
        (folder / name).write_text(CODE.format(mark=str(mark)))
    shutil.copy(next(clips.glob("*.flac")), folder / "a.flac")
    (folder / "metadata.csv").write_text("file_name,transcription\na.flac,un\n")
    (source,) = parse_sources(str(folder), "data.train", "train")
    with pytest.raises(UserError, match="Dataset scripts are no longer supported"):
        open_source(source, "data.train")
    assert not mark.exists()


def test_the_tokenizer_that_ships_is_taken():
    assert read_tokenizer(str(TOKENIZER), "--against").pieces
