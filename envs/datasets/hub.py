"""Asks the Hugging Face hub once whether it has a model or data set, before a library asks many times and waits."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Literal

from envs.errors import UserError, first_line

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_NO_ID = "there is no such folder, and it is no hub id, such as Qwen/Qwen3-VL-2B-Instruct"
#: The longest wait for the hub, in seconds.
ASK_S = 10.0


@functools.cache
def hub_problem(name: str, kind: Literal["model", "dataset"]) -> str:
    """Return why the hub cannot give a repository, in one line; empty if it can, or if this machine has a copy.

    Example: `hub_problem("Qwen/Qwen3-VL-2B-Instuct", "model")` is "the hub has no such model, or it is private (...)".
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    if constants.HF_HUB_OFFLINE:  # then the libraries answer at once
        return ""
    try:
        # A copy works without network, and an answer of the hub would cost a request in every process.
        if Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "snapshots").is_dir():
            return ""
        HfApi().repo_info(name, repo_type=kind, timeout=ASK_S)
    except GatedRepoError:
        return "accept its terms on its page of the hub first, and log in (`hf auth login`)"
    except RepositoryNotFoundError:
        return f"the hub has no such {kind}, or it is private (`hf auth login`)"
    except HFValidationError:
        return _NO_ID
    except Exception as error:  # the HTTP packages have many errors
        return f"there is no such folder here, and the hub gives no answer ({first_line(error)})"
    return ""


def check_is_there(path: str | Path) -> None:
    """Raise `UserError` if a model is neither a folder nor on the hub, where the libraries would ask for a minute."""
    if Path(path).is_dir():
        return
    if Path(path).exists():
        problem = "it is a file: give the folder that config.json is in"
    elif not _MODEL_ID.fullmatch(str(path)):
        problem = _NO_ID
    else:
        problem = hub_problem(str(path), "model")
    if problem:
        raise UserError("--model", "must be a model folder or hub id", str(path), problem)
