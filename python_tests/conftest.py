import re

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine may take any time for one example.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The examples are the same in every run, and few.
settings.register_profile(
    "steady", **_common, derandomize=True, database=None, max_examples=100, stateful_step_count=15
)
# Others in every run, and many: for a night. What fails is kept in .hypothesis and tried first the next time.
settings.register_profile("long", **_common, max_examples=2000, print_blob=True)
settings.load_profile("steady")

_examples = {"passed": 0, "tests": 0}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same numbers in every run and every order of the tests: torch seeds itself anew in each process."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Hypothesis says of each test how many examples passed in each of its phases."""
    passed = re.findall(r"(\d+) passing", getattr(item, "hypothesis_statistics", ""))
    _examples["passed"] += sum(map(int, passed))
    _examples["tests"] += bool(passed)


def pytest_terminal_summary(terminalreporter):
    if settings.get_current_profile_name() == "long":
        terminalreporter.write_line(f"{_examples['passed']} examples passed in {_examples['tests']} tests")


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN, so that a cell which no kernel wrote fails the test."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
