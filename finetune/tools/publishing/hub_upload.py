"""The upload itself: one commit, there as a whole or not at all; every failure in one message, without the token."""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from finetune.errors import UserError
from finetune.security.secrets import clean_text
from finetune.tools.publishing.base import Base, licence_in
from finetune.tools.publishing.uploads import Upload

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
NOTHING = "Nothing was uploaded."
REFUSALS = {
    401: "the Hub does not accept the token (401). Log in again with `hf auth login`, or set HF_TOKEN to a valid one.",
    403: "the token may not do that (403). Use one that may write to this owner's repositories, "
    "or name another --repo.",
    404: "the Hub finds no such owner, repository or branch, or does not show it to this token (404).",
    429: "the Hub was asked too often (429). Try again later.",
}


def need_token() -> None:
    """Check that there is a token, from HF_TOKEN or a login; huggingface_hub reads it by itself.

    Raises:
        UserError: there is none, or the Hub is switched off.
    """
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        names = [name for name in OFFLINE if os.environ.get(name)] or ["HF_HUB_OFFLINE"]
        raise UserError(f"the Hub is switched off by {', '.join(names)}: unset {' '.join(names)} for this command.")
    if not get_token():
        raise UserError(
            "there is no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
        )


def licence_from_hub(base: Base, hub: str, secrets: Set[str]) -> Base:
    """Return the base model with the licence that its card on the Hub names.

    Raises:
        UserError: the Hub does not answer, or has no such model.
    """
    from huggingface_hub import HfApi

    remedy = f"{NOTHING} Give the licence with --base-licence, or the right name with --base-model."
    with explained(f"reading the licence of the base model {hub}", remedy, secrets):
        info = HfApi().model_info(hub)
    return licence_in(info.card_data.to_dict() if info.card_data else {}, base, f"the card of {hub} on the Hub")


def push(upload: Upload, arguments: argparse.Namespace, secrets: Set[str]) -> str:
    """Create the repository where there is none, and upload all files in one commit.

    Args:
        upload: the files.
        arguments: of the command. An existing public repository is refused without `public`.
        secrets: values that must not be in a message.

    Returns:
        Where it is, and the commit.

    Raises:
        UserError: the Hub refuses or does not answer; the message says whether anything was changed.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    repo, revision = arguments.repo, arguments.revision
    api, page, before = HfApi(), f"{constants.ENDPOINT}/{repo}", None
    with explained(f"looking for {repo}", NOTHING, secrets):
        try:
            before = api.model_info(repo)
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:
                raise
    if before is not None and not (before.private or arguments.public):
        raise UserError(
            f"{repo} is there and public. {NOTHING} Add --public to upload to it, or name another repository."
        )
    if before is None:
        with explained(f"creating {repo}", NOTHING, secrets):
            api.create_repo(repo, private=not arguments.public, exist_ok=True)
    as_it_is = f"{repo} was made and is empty." if before is None else f"{repo} is as it was."
    if revision is not None:
        with explained(f"creating the branch {revision}", as_it_is, secrets):
            api.create_branch(repo, branch=revision, exist_ok=True)
    with explained(f"looking at {repo}", as_it_is, secrets):
        start = api.model_info(repo, revision=revision).sha
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in upload.files.items()
    ]

    def after_failure() -> str:
        try:
            arrived = api.model_info(repo, revision=revision).sha != start
        except Exception:  # whatever broke the upload may still be broken
            return f"Whether the commit arrived is not known: look at {page}. It is there as a whole or not at all."
        if arrived:
            return f"But {repo} has a new commit: look at {page}."
        return f"No part of it can be seen: {as_it_is} The same command tries again."

    with explained(f"uploading to {repo}", after_failure, secrets), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what the Hub would like the card to have besides
        done = api.create_commit(repo, operations, commit_message=arguments.message, revision=revision)
    address = clean_text(page + (f"/tree/{revision}" if revision else ""), personal=False)
    is_private = before.private if before is not None else not arguments.public
    state = "private" if is_private else "public"
    return f"{address}  ({state}, {len(upload.files)} files, commit {done.oid[:12]})"


@contextmanager
def explained(what: str, after: str | Callable[[], str], secrets: Set[str]) -> Iterator[None]:
    """Turn the failure of a request into one message.

    Args:
        what: is being done.
        after: how things are after a failure.
        secrets: values that must not be in the message.

    Raises:
        UserError: the request failed.
        KeyboardInterrupt: it was interrupted; with the message.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        failed = "." if interrupted else f" failed: {_reason(error)}"
        text = f"{what}{failed} {after if isinstance(after, str) else after()}"
        text = clean_text(text, frozenset(secrets), personal=False)
    else:
        return
    # No chain: the causes may show headers.
    raise KeyboardInterrupt(text) if interrupted else UserError(text, exit_code=1) from None


def _reason(error: BaseException) -> str:
    """Return what went wrong and what to do about it, in a sentence or two."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    chain = [error]  # and its causes, the first cause last
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    answered = next((e for e in chain if isinstance(e, HfHubHTTPError) and e.response is not None), None)
    if answered is not None:
        status, said = answered.response.status_code, " ".join((answered.server_message or "").split())
        if status >= 500:
            return f"the Hub has a fault of its own (status {status}). Try again later."
        return REFUSALS.get(status) or f"the Hub refuses it (status {status}){': ' + said if said else ''}."
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return "the Hub is switched off by HF_HUB_OFFLINE."
    if isinstance(error, HFValidationError | ValueError):
        return " ".join(str(error).split()) + "."
    if any(isinstance(e, FileNotFoundError | PermissionError) for e in chain):
        return f"a file cannot be read: {' '.join(str(chain[-1]).split())}."
    name = type(chain[-1]).__name__
    return f"{constants.ENDPOINT} does not answer ({name}). Check the network and the proxy (HTTPS_PROXY)."
