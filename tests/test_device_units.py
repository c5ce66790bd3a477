"""The unit tests of csrc/ptx, csrc/tile and csrc/attention (tests/device), run as pytest cases.

They are one executable, which the build makes when asked to:

    CMAKE_ARGS=-DFLASHATTN_EXT_DEVICE_TESTS=ON python setup.py build_ext --inplace

The newest one under build/ is taken, or the one FLASHATTN_EXT_DEVICE_TESTS names. Its host tests
need no GPU.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "flashattn_ext_device_tests"
NOT_BUILT = f"{NAME} is not built: build with CMAKE_ARGS=-DFLASHATTN_EXT_DEVICE_TESTS=ON"
TIMEOUT_SECONDS = 120  # a barrier that never opens shows as this


def find_executable():
    """The executable's path, or None where there is none; a wrong path given is an error."""
    given = os.environ.get("FLASHATTN_EXT_DEVICE_TESTS")
    if given:
        if not Path(given).is_file():
            raise FileNotFoundError(f"FLASHATTN_EXT_DEVICE_TESTS names {given}: no such file")
        return Path(given)
    built = ROOT.glob(f"build/*/{NAME}")
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


EXECUTABLE = find_executable()
needs_executable = pytest.mark.skipif(EXECUTABLE is None, reason=NOT_BUILT)


def run(*arguments):
    return subprocess.run(
        [EXECUTABLE, *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )


def list_tests(*, host):
    """The names of the host tests or of the device tests."""
    if EXECUTABLE is None:
        return []
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    return [name for name in listed.stdout.splitlines() if name.startswith("host:") == host]


def assert_passes(result, count):
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith(f"\n{count} passed, 0 failed, 0 skipped\n"), result.stdout


@needs_executable
def test_host_units():
    names = list_tests(host=True)
    assert names
    assert_passes(run("--host-only"), len(names))


@pytest.mark.gpu
@needs_executable
@pytest.mark.parametrize("name", list_tests(host=False) or ["not built"])
def test_device_unit(name):
    result = run(name)
    if result.stdout.startswith("skip "):
        pytest.skip(result.stdout.splitlines()[0].removeprefix("skip "))
    assert_passes(result, 1)


@needs_executable
@pytest.mark.parametrize("arguments", [["no.such.test"], ["--no-such-option"]])
def test_what_cannot_be_run_is_an_error(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr
