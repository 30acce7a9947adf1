"""One tiny model for all tests of this folder: it takes a second to make."""

from pathlib import Path

import pytest

from eaglehs.demo.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder)
    return folder
