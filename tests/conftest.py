"What pytest does for all tests: samples of large grids unless `--all` is given, and fixtures that hold still what would move."
import pytest
from hypothesis import settings

from k3lib import parallel, plan

# a failure seen once is seen again, and none comes by chance
settings.register_profile("book", derandomize=True, deadline=None)
settings.load_profile("book")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of the large grids, instead of a sample that holds each kind of case")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: a case of a large grid that only `--all` runs")


# Files of few and long tests come first, so that the last worker to end has short ones.
LONG = "test_budgets.py", "test_contract.py", "test_trunk.py", "test_experts.py", "test_failing_io.py", "test_faults.py", "test_checkpoint.py", "test_cli.py"


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("large")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("large")]


@pytest.fixture(scope="session")
def everything(request):
    "True if every case of the large grids is to run: a test that loops over a grid itself asks this."
    return request.config.getoption("--all")


@pytest.fixture
def steady(monkeypatch):
    "A process of 150 MB to every plan: a real one grows a little between asking for the least budget and spending it."
    monkeypatch.setattr(plan, "resident_bytes", lambda: 150_000_000)


@pytest.fixture
def all_threads(monkeypatch):
    "Work is spread over all threads, however little it is."
    monkeypatch.setattr(parallel, "MIN_PARALLEL_MACS", 0)
