"""The layout of a run's model with the vocabulary that the run gives it."""

from dataclasses import replace
from typing import Any

from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.models.loading import is_tokenizer, read_tokenizer
from finetune.tools.planning.layout import Layout, read_layout


def layout_of(config: Any) -> Layout:
    """The layout of `model.name`, its vocabulary changed as `model.tokenizer` says.

    No text is read for it: where pieces are learned from texts, as many count as may be added at most.

    Args:
        config: the run's configuration.

    Raises:
        UserError: nothing is found under the name that says what the model looks like.
    """
    setting = tokenizer_setting(config)
    layout = read_layout(config.model.name, setting.dir)
    if not setting.changes:
        return layout
    if setting.size is None and is_tokenizer(setting.origin):
        size = len(read_tokenizer(setting.origin, setting.key).pieces)
        setting = setting.model_copy(update={"size": size})
    return replace(layout, tokens=setting.most_pieces(layout.tokens))
