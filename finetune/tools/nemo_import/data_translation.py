"""What NeMo's data sets become: sources, batches and filters."""

from typing import Any

from finetune.tools.nemo_import.source import Import


def translate_data(imported: Import) -> None:
    """`model.train_ds`, `validation_ds` and `test_ds`."""
    train = "model.train_ds"
    for section, key in (("train_ds", "train"), ("validation_ds", "validation"), ("test_ds", "test")):
        _sources(imported, f"model.{section}", f"data.{key}")
        for name in ("sample_rate", "is_tarred", "use_lhotse", "force_finite", "shuffle", "num_workers", "pin_memory"):
            if section != "train_ds" or name in ("is_tarred", "use_lhotse"):
                imported.get(f"model.{section}.{name}")  # said by the source, or the same for all here
        if imported.get(f"model.{section}.sample_rate", 16000) != 16000:
            imported.leave(f"model.{section}.sample_rate", "audio is resampled to the model's own rate")
        if imported.get(f"model.{section}.normalize_text"):
            imported.set("data.text_normalization", "basic", f"model.{section}.normalize_text: nearest to it")
        for name in ("streaming", "text_key", "audio_key", "use_start_end_token", "sample_rate_key"):
            if imported.get(f"model.{section}.{name}") is False or name in ("streaming", "text_key", "audio_key"):
                imported.get(f"model.{section}.{name}")
    for name in ("data_path", "data_name", "streaming", "audio_key", "sample_rate_key", "text_key", "normalize_text"):
        imported.get(f"model.{name}")  # the data sets refer to them
    seconds = imported.get(f"{train}.batch_duration")
    longest = imported.get(f"{train}.max_duration")
    imported.copy(f"{train}.min_duration", "data.min_duration")
    if longest is not None:
        imported.set("data.max_duration", longest, f"{train}.max_duration")
    elif imported.section(train):
        imported.set("data.max_duration", float("inf"), "NeMo has no limit where none is set")
    if seconds:
        imported.set("data.batch_duration", seconds, f"{train}.batch_duration")
        if longest is None or longest > seconds:
            imported.set("data.max_duration", seconds, f"as {train}.batch_duration: longer clips fit no batch")
        if imported.get(f"{train}.batch_size"):
            imported.leave(f"{train}.batch_size", "data.batch_duration takes its place")
    else:
        imported.copy(f"{train}.batch_size", "training.per_device_train_batch_size")
        if isinstance(size := imported.get(f"{train}.bucket_batch_size"), list):
            imported.leave(
                f"{train}.bucket_batch_size", "set data.batch_duration, which gives short clips large batches"
            )
            imported.set(
                "training.per_device_train_batch_size", min(size), f"the smallest of {train}.bucket_batch_size"
            )
    imported.copy("model.validation_ds.batch_size", "training.per_device_eval_batch_size")
    test_size = imported.get("model.test_ds.batch_size")
    if test_size and "training.per_device_eval_batch_size" not in imported.settings:
        imported.set("training.per_device_eval_batch_size", test_size, "model.test_ds.batch_size")
    elif test_size and test_size != imported.settings["training.per_device_eval_batch_size"][0]:
        imported.leave("model.test_ds.batch_size", "there is one batch size for all evaluations")
    for source, key in (
        ("shuffle", "data.shuffle"),
        ("shuffle_n", "data.shuffle_buffer_size"),
        ("shuffle_buffer_size", "data.shuffle_buffer_size"),
        ("num_workers", "training.dataloader_num_workers"),
        ("pin_memory", "training.dataloader_pin_memory"),
        ("use_bucketing", "data.group_by_duration"),
    ):
        imported.copy(f"{train}.{source}", key)
    if (imported.get(f"{train}.max_utts") or 0) > 0:
        imported.copy(f"{train}.max_utts", "data.max_samples")
    filters = {}
    if imported.get(f"{train}.max_tokens"):
        filters["max_tokens"] = imported.get(f"{train}.max_tokens")
        imported.set("data.filters", filters, f"{train}.max_tokens")
    _augmentation(imported, train)


def _augmentation(imported: Import, train: str) -> None:
    if imported.get(f"{train}.perturb_speed"):
        imported.set(
            "data.augment", {"speed": 0.67, "speed_factors": [0.9, 1.1]}, f"{train}.perturb_speed, as Lhotse does it"
        )
    speed = imported.get(f"{train}.augmentor.speed")
    if isinstance(speed, dict) and speed.get("prob"):
        factors = [speed.get("min_speed_rate", 0.9), speed.get("max_speed_rate", 1.1)]
        value = {"speed": speed["prob"], "speed_factors": factors}
        imported.set("data.augment", value, f"{train}.augmentor.speed, at its two ends")


def _sources(imported: Import, section: str, key: str) -> None:
    """The sources that a data set of NeMo's consists of."""
    node = imported.section(section)
    if not node:
        if key == "data.train":
            imported.to_fill[key] = f"{section}.manifest_filepath"
        return
    columns = {"text_column": node.get("text_field"), "language_column": node.get("lang_field")}
    columns = {k: v for k, v in columns.items() if v and v != {"text_column": "text", "language_column": "lang"}[k]}
    for name in ("text_field", "lang_field"):
        imported.get(f"{section}.{name}")
    hub = imported.get(f"{section}.hf_data_cfg")
    inputs = imported.get(f"{section}.input_cfg")
    manifest = imported.get(f"{section}.manifest_filepath")
    tars = imported.get(f"{section}.tarred_audio_filepaths")
    if hub:
        found, comment = _hub_sources(hub, node), f"{section}.hf_data_cfg"
    elif isinstance(inputs, list):
        found, comment = _input_sources(imported, f"{section}.input_cfg", inputs, None), f"{section}.input_cfg"
    else:
        if inputs:
            imported.leave(f"{section}.input_cfg", "write the sources of that file here, as a list")
        found, comment = _manifests(manifest, tars), f"{section}.manifest_filepath"
    found = [{**source, **columns} for source in found]
    if not found:
        if imported.is_blank(f"{section}.manifest_filepath") or key == "data.train":
            imported.to_fill[key] = f"{section}.manifest_filepath"
            imported.set(key, "???", f"{section}.manifest_filepath")
        return
    plain = [source["path"] if set(source) == {"path"} else source for source in found]
    imported.set(key, plain[0] if len(plain) == 1 else plain, comment)


def _flat(value: Any) -> list[Any]:
    """Paths of a string with commas, a list, or a list of lists (one a bucket, or with weights behind the paths)."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return [path for entry in value for path in _flat(entry)]
    return [value] if isinstance(value, int | float) else []


def _manifests(manifest: Any, tars: Any) -> list[dict[str, Any]]:
    entries, audio = _flat(manifest), [path for path in _flat(tars) if isinstance(path, str)]
    found: list[dict[str, Any]] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append({"path": entry})
        elif found:  # [path, weight]
            found[-1]["weight"] = entry
    for source, path in zip(found, audio, strict=False):
        source["tarred_audio"] = path
    return found


def _hub_sources(hub: Any, node: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for entry in hub if isinstance(hub, list) else [hub]:
        source = {name: entry[name] for name in ("path", "name", "split", "revision") if entry.get(name)}
        if node.get("text_key") and node["text_key"] != "text":
            source["text_column"] = str(node["text_key"]).split(".")[0]
        if node.get("audio_key") and str(node["audio_key"]).split(".")[0] != "audio":
            source["audio_column"] = str(node["audio_key"]).split(".")[0]
        found.append(source)
    return found


def _input_sources(imported: Import, key: str, entries: list[Any], share: float | None) -> list[dict[str, Any]]:
    """Lhotse's input_cfg: entries of manifests, and groups of such, whose weights multiply; entries of one group without weights
    have equal ones.

    Args:
        share: weight of the group that the entries make; None where nothing has weights so far.
    """
    found: list[dict[str, Any]] = []
    entries = [entry for entry in entries if isinstance(entry, dict)]
    if share is None and any(_has_weight(entry) for entry in entries):
        share = 1.0
    total = sum(float(entry.get("weight") or 1.0) for entry in entries)
    for entry in entries:
        weight = None if share is None else share * float(entry.get("weight") or 1.0) / total
        if isinstance(entry.get("input_cfg"), list):
            found += _input_sources(imported, key, entry["input_cfg"], weight)
            continue
        sources = _manifests(entry.get("manifest_filepath"), entry.get("tarred_audio_filepaths"))
        if not sources:
            imported.left[f"{key} {entry.get('type', '')}".strip()] = (
                "not read: give NeMo manifests, tar or parquet shards"
            )
        tags = entry.get("tags") or {}
        language = entry.get("lang") or tags.get("lang") or tags.get("source_lang")
        for source in sources:
            if weight is not None:
                source["weight"] = round(weight / len(sources), 6)
            found.append({**source, **({"language": language} if language else {})})
    return found


def _has_weight(entry: dict[str, Any]) -> bool:
    inner = entry.get("input_cfg")
    return entry.get("weight") is not None or (
        isinstance(inner, list) and any(_has_weight(e) for e in inner if isinstance(e, dict))
    )
