"""Shared test set-up: GPU markers, devices, seeds, poisoned allocations, the hypothesis profile.

Helpers that tests import by name live beside this file: `cases` (the problems and their inputs),
`reference` (the unfused computation), `compare` (the accuracy rule), `harness` (a case through the
public functions) and `spec_runner` (the specification).
"""

import os

# cuBLAS asks for this before its first call when deterministic algorithms are on (see `poison`).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

# The tests are many small problems; a second OpenMP thread only spins beside the first.
torch.set_num_threads(1)

try:
    import hypothesis
except ImportError:  # the property tests skip themselves, everything else still runs
    hypothesis = None

if hypothesis is not None:
    # "repo" tries the same examples every time; "search" looks for new ones.
    hypothesis.settings.register_profile("repo", deadline=None, derandomize=True, max_examples=30)
    hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repo"))


def missing_gpu(markers):
    """The reason a test with these marker names cannot run here, or None."""
    if not markers & {"gpu", "sm90"}:
        return None
    if not torch.cuda.is_available():
        return "needs a CUDA device and torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"needs compute capability 8.0 or newer, this device has {major}.{minor}"
    if "sm90" in markers and major != 9:
        return f"needs compute capability 9.x, this device has {major}.{minor}"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        reason = missing_gpu({marker.name for marker in item.iter_markers()})
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Runs the test on the CPU path and, where there is a GPU, on the CUDA path."""
    return request.param


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda-sm80", marks=[pytest.mark.gpu, pytest.mark.sm90]),
    ]
)
def device_plan(request):
    """(device, plan): like `device`, and the portable kernels where others are preferred."""
    return device_and_plan(request.param)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        *(
            pytest.param(f"cuda-{plan}", marks=[pytest.mark.gpu, pytest.mark.sm90])
            for plan in ("sm90_fused", "sm90", "sm80")
        ),
    ]
)
def backward_plan(request):
    """(device, plan): like `device`, and each family of kernels where all of them run.

    `harness.check` skips what the named family refuses. While `poison` is on, the default sums dQ
    in order and "sm90_fused" in any order.
    """
    return device_and_plan(request.param)


def device_and_plan(name):
    device, _, plan = name.partition("-")
    return device, plan or None


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same state of torch's generators."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poison(request):
    """Fills every torch.empty with NaN (integers: the largest value), on every device.

    Memory that a kernel forgets to write, or reads without having written it, then shows up as NaN.
    torch fills only while deterministic algorithms are on; `warn_only` keeps the reference free to
    use operations that have no deterministic form.
    """
    if request.node.get_closest_marker("no_poison"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    before_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before_fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before_fill
    torch.use_deterministic_algorithms(before, warn_only=before_warn_only)


@pytest.fixture
def switch():
    """torch.use_deterministic_algorithms, put back afterwards."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
