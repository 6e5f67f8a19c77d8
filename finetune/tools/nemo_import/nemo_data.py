"""What NeMo's data sets become: sources, batches and filters."""

from typing import Any

from finetune.tools.nemo_import.source import Import

TRAIN = "model.train_ds"
DATA_SETS = {TRAIN: "data.train", "model.validation_ds": "data.validation", "model.test_ds": "data.test"}
COPIED = {
    f"{TRAIN}.min_duration": "data.min_duration",
    f"{TRAIN}.shuffle": "data.shuffle",
    f"{TRAIN}.shuffle_n": "data.shuffle_buffer_size",
    f"{TRAIN}.shuffle_buffer_size": "data.shuffle_buffer_size",
    f"{TRAIN}.num_workers": "training.dataloader_num_workers",
    f"{TRAIN}.pin_memory": "training.dataloader_pin_memory",
    f"{TRAIN}.use_bucketing": "data.group_by_duration",
    "model.validation_ds.batch_size": "training.per_device_eval_batch_size",
}
SAID_BY_SOURCE = ("is_tarred", "use_lhotse", "streaming", "text_key", "audio_key", "sample_rate_key")
SAME_FOR_ALL = ("sample_rate", "force_finite", "shuffle", "num_workers", "pin_memory")
REFERRED_TO = ("data_path", "data_name", "streaming", "audio_key", "sample_rate_key", "text_key", "normalize_text")
"""Keys of `model:` that the data sets refer to."""


def translate_data(imported: Import) -> None:
    """Translate `model.train_ds`, `validation_ds` and `test_ds`."""
    for section, key in DATA_SETS.items():
        _sources(imported, section, key)
        for name in SAID_BY_SOURCE + (() if section == TRAIN else SAME_FOR_ALL):
            imported.get(f"{section}.{name}")
        if imported.get(f"{section}.sample_rate", 16000) != 16000:
            imported.leave(f"{section}.sample_rate", "audio is resampled to the model's own rate")
        if imported.get(f"{section}.normalize_text"):
            imported.set("data.text_normalization", "basic", f"{section}.normalize_text: nearest to it")
        if imported.leaves.get(f"{section}.use_start_end_token") is False:
            imported.used.add(f"{section}.use_start_end_token")
    for name in REFERRED_TO:
        imported.get(f"model.{name}")
    for source, key in COPIED.items():
        imported.copy(source, key)
    _batches(imported)
    if (imported.get(f"{TRAIN}.max_utts") or 0) > 0:
        imported.copy(f"{TRAIN}.max_utts", "data.max_samples")
    if longest := imported.get(f"{TRAIN}.max_tokens"):
        imported.set("data.filters", {"max_tokens": longest}, f"{TRAIN}.max_tokens")
    _augmentation(imported)


def _batches(imported: Import) -> None:
    seconds, longest = imported.get(f"{TRAIN}.batch_duration"), imported.get(f"{TRAIN}.max_duration")
    if longest is not None:
        imported.set("data.max_duration", longest, f"{TRAIN}.max_duration")
    elif imported.section(TRAIN):
        imported.set("data.max_duration", float("inf"), "NeMo has no limit where none is set")
    if seconds:
        imported.set("data.batch_duration", seconds, f"{TRAIN}.batch_duration")
        if longest is None or longest > seconds:
            imported.set("data.max_duration", seconds, f"as {TRAIN}.batch_duration: longer clips fit no batch")
        if imported.get(f"{TRAIN}.batch_size"):
            imported.leave(f"{TRAIN}.batch_size", "data.batch_duration takes its place")
    else:
        imported.copy(f"{TRAIN}.batch_size", "training.per_device_train_batch_size")
        key = f"{TRAIN}.bucket_batch_size"
        if isinstance(sizes := imported.get(key), list):
            imported.leave(key, "set data.batch_duration, which gives short clips large batches")
            imported.set("training.per_device_train_batch_size", min(sizes), f"the smallest of {key}")
    test, eval_key = imported.get("model.test_ds.batch_size"), "training.per_device_eval_batch_size"
    if test and eval_key not in imported.settings:
        imported.set(eval_key, test, "model.test_ds.batch_size")
    elif test and test != imported.settings[eval_key][0]:
        imported.leave("model.test_ds.batch_size", "there is one batch size for all evaluations")


def _augmentation(imported: Import) -> None:
    if imported.get(f"{TRAIN}.perturb_speed"):
        value = {"speed": 0.67, "speed_factors": [0.9, 1.1]}
        imported.set("data.augment", value, f"{TRAIN}.perturb_speed, as Lhotse does it")
    speed = imported.get(f"{TRAIN}.augmentor.speed")
    if isinstance(speed, dict) and speed.get("prob"):
        factors = [speed.get("min_speed_rate", 0.9), speed.get("max_speed_rate", 1.1)]
        value = {"speed": speed["prob"], "speed_factors": factors}
        imported.set("data.augment", value, f"{TRAIN}.augmentor.speed, at its two ends")


def _sources(imported: Import, section: str, key: str) -> None:
    """Set the sources that a data set of NeMo's consists of."""
    node, manifest_key = imported.section(section), f"{section}.manifest_filepath"
    if not node:
        if key == "data.train":
            imported.to_fill[key] = manifest_key
        return
    columns = {}
    for column, name, usual in (("text_column", "text_field", "text"), ("language_column", "lang_field", "lang")):
        if (value := imported.get(f"{section}.{name}")) and value != usual:
            columns[column] = value
    hub, inputs = imported.get(f"{section}.hf_data_cfg"), imported.get(f"{section}.input_cfg")
    manifest, tars = imported.get(manifest_key), imported.get(f"{section}.tarred_audio_filepaths")
    if hub:
        found, comment = _hub_sources(hub, node), f"{section}.hf_data_cfg"
    elif isinstance(inputs, list):
        found, comment = _input_sources(imported, f"{section}.input_cfg", inputs, None), f"{section}.input_cfg"
    else:
        if inputs:
            imported.leave(f"{section}.input_cfg", "write the sources of that file here, as a list")
        found, comment = _manifests(manifest, tars), manifest_key
    if found:
        found = [{**source, **columns} for source in found]
        plain = [source["path"] if set(source) == {"path"} else source for source in found]
        imported.set(key, plain[0] if len(plain) == 1 else plain, comment)
    elif imported.is_blank(manifest_key) or key == "data.train":
        imported.to_fill[key] = manifest_key
        imported.set(key, "???", manifest_key)


def _flat(value: object) -> list[str | float]:
    """Return the paths of a string with commas, a list, or a list of lists: one a bucket, or with weights behind."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return [path for entry in value for path in _flat(entry)]
    return [value] if isinstance(value, int | float) else []


def _manifests(manifest: object, tars: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in _flat(manifest):
        if isinstance(entry, str):
            found.append({"path": entry})
        elif found:  # [path, weight]
            found[-1]["weight"] = entry
    for source, path in zip(found, (path for path in _flat(tars) if isinstance(path, str)), strict=False):
        source["tarred_audio"] = path
    return found


def _hub_sources(hub: Any, node: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {}
    for name, column in (("text_key", "text_column"), ("audio_key", "audio_column")):
        value, usual = str(node.get(name) or ""), column.removesuffix("_column")
        if value and value.split(".")[0] != usual:
            columns[column] = value.split(".")[0]
    return [
        {**{name: entry[name] for name in ("path", "name", "split", "revision") if entry.get(name)}, **columns}
        for entry in (hub if isinstance(hub, list) else [hub])
    ]


def _input_sources(imported: Import, key: str, entries: list[Any], share: float | None) -> list[dict[str, Any]]:
    """Return the sources of Lhotse's input_cfg: entries of manifests, and groups of such, whose weights multiply.

    Entries without weights have equal shares of the group's weight; None: nothing has a weight so far.
    """
    found: list[dict[str, Any]] = []
    entries = [entry for entry in entries if isinstance(entry, dict)]
    if share is None and any(map(_has_weight, entries)):
        share = 1.0
    total = sum(float(entry.get("weight") or 1.0) for entry in entries)
    for entry in entries:
        weight = None if share is None else share * float(entry.get("weight") or 1.0) / total
        if isinstance(entry.get("input_cfg"), list):
            found += _input_sources(imported, key, entry["input_cfg"], weight)
            continue
        sources = _manifests(entry.get("manifest_filepath"), entry.get("tarred_audio_filepaths"))
        if not sources:
            name = f"{key} {entry.get('type', '')}".strip()
            imported.left[name] = "not read: give NeMo manifests, tar or parquet shards"
        tags = entry.get("tags") or {}
        language = entry.get("lang") or tags.get("lang") or tags.get("source_lang")
        for source in sources:
            if weight is not None:
                source["weight"] = round(weight / len(sources), 6)
            if language:
                source["language"] = language
        found += sources
    return found


def _has_weight(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    inner = entry.get("input_cfg")
    return entry.get("weight") is not None or (isinstance(inner, list) and any(map(_has_weight, inner)))
