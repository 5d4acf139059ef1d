"""transformers is silent, offline and on one core; importing it takes seconds, so only tests that use it do."""

import os

import pytest
from their_models import MODELS, new_model

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def transformers():
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="session")
def saved(transformers, tmp_path_factory):
    """The folder of a small model by name, written by transformers once."""
    folders = {}

    def folder_of(name: str):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("models") / name
            new_model(transformers, *MODELS[name]).save_pretrained(folders[name])
        return folders[name]

    return folder_of
