"""Fixtures for the device of these tests: ``SGP_TEST_DEVICE``, or the CPU.

With ``SGP_TEST_DEVICE=emulated`` the device of ``emulated.py`` is registered, for the whole process.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from device import emulated

from sgp.projection.precision import has_float64

NAME = os.environ.get("SGP_TEST_DEVICE", "cpu")
IS_EMULATED = NAME == emulated.NAME
IS_TOO_OLD = IS_EMULATED and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
if IS_EMULATED and not IS_TOO_OLD:
    emulated.register()


@pytest.fixture
def device() -> torch.device:
    """Return the device to test, with its index."""
    return torch.zeros(0, device=NAME).device


@pytest.fixture
def emulator() -> Iterator[emulated.Emulator]:
    """Yield the emulator, or skip the test on any other device."""
    if not IS_EMULATED:
        pytest.skip("needs the emulated device: SGP_TEST_DEVICE=emulated")
    yield emulated.EMULATOR
    emulated.EMULATOR.rounds_products = False


@pytest.fixture
def without_float64(emulator: emulated.Emulator) -> Iterator[None]:
    """Disable float64 on the emulated device, as on MPS."""
    emulator.has_float64 = False
    has_float64.cache_clear()
    yield
    emulator.has_float64 = True
    has_float64.cache_clear()


@pytest.fixture(autouse=True)
def _settings_as_before() -> Iterator[None]:
    """Seed all random states, set convolutions to full precision, and restore the settings of PyTorch afterwards."""
    if IS_TOO_OLD:
        pytest.skip("the emulated device needs torch 2.9")
    torch.manual_seed(0)
    allow_tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_default_device(None)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allow_tf32
