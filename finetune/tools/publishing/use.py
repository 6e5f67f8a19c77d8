"""How to use a shared model, for its card."""


def use_section(repo: str, formats: set[str], revision: str | None, base: str | None) -> str:
    """Code for what was uploaded, and no other.

    Args:
        repo: OWNER/NAME.
        formats: which of nemo, hf and adapter are uploaded.
        revision: branch; None: main.
        base: hub name of the base model.
    """
    said = ["## Use"]
    if "nemo" in formats:
        said.append("With [NeMo](https://github.com/NVIDIA-NeMo/NeMo):\n\n" + code("python", _nemo(repo, revision)))
        said.append(
            "With the pipeline that trained it, which takes audio of any length:\n\n"
            + code("bash", _pipeline(repo, revision))
        )
    if "hf" in formats:
        said.append("With transformers:\n\n" + code("python", _transformers(repo, revision)))
    if "adapter" in formats:
        over = f"[{base}](https://huggingface.co/{base})" if base else "its base model"
        first = (
            "it loads the base model of that name and adds the adapter"
            if base
            else "write where the base model lies as `name` into adapter/base_model.json before the second line"
        )
        said.append(
            f"This is a LoRA adapter in PEFT's format, to be merged into {over}. With the pipeline that trained it ({first}):"
        )
        at = f" --revision {revision}" if revision else ""
        lines = f"hf download {repo}{at} --local-dir adapter\npython -m finetune.transcribe --model adapter audio.wav"
        said.append(code("bash", lines))
    return "\n\n".join(said)


def code(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```"


def _nemo(repo: str, revision: str | None) -> str:
    if revision is None:
        load = f'model = ASRModel.from_pretrained("{repo}")'
        imports = "from nemo.collections.asr.models import ASRModel"
    else:
        file = f"{repo.rpartition('/')[2]}.nemo"
        load = f'model = ASRModel.restore_from(hf_hub_download("{repo}", "{file}", revision="{revision}"))'
        imports = "from huggingface_hub import hf_hub_download\nfrom nemo.collections.asr.models import ASRModel"
    return f'{imports}\n\n{load}\nprint(model.transcribe(["audio.wav"])[0].text)'


def _pipeline(repo: str, revision: str | None) -> str:
    if revision is None:
        return f"python -m finetune.transcribe --model {repo} audio.wav"
    file = f"{repo.rpartition('/')[2]}.nemo"
    return f"hf download {repo} {file} --revision {revision} --local-dir .\npython -m finetune.transcribe --model {file} audio.wav"


def _transformers(repo: str, revision: str | None) -> str:
    at = f', revision="{revision}"' if revision else ""
    return f'from transformers import pipeline\n\nrecognise = pipeline("automatic-speech-recognition", model="{repo}"{at})\nprint(recognise("audio.wav")["text"])'
