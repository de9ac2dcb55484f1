"""An integration whose library is missing names the package to install."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "libraries", "extra"),
    [
        ("transformers", ["transformers"], "transformers"),
        ("lightning", ["lightning.pytorch", "pytorch_lightning"], "lightning"),
        ("stable_baselines3", ["stable_baselines3.common.callbacks"], "rl"),
    ],
)
def test_a_missing_library_is_named(
    module: str, libraries: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"sgp.integrations.{module}", raising=False)
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf'pip install "sgp-torch\[{extra}\]"'):
        importlib.import_module(f"sgp.integrations.{module}")
