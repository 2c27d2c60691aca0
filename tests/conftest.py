"What pytest does for all tests: samples of large grids unless `--all` is given, and fixtures that fix what varies."
import pytest
from hypothesis import settings
from interrupts import hear_interrupts

from k3lib import parallel, plan

# a failure seen once is seen again, and none comes by chance
settings.register_profile("book", derandomize=True, deadline=None)
settings.load_profile("book")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true",
                     help="run every case of the large grids, instead of a sample that holds each kind of case")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: a case of a large grid that only `--all` runs")
    hear_interrupts()


# Two workers take whole files, in this order. What takes long comes first, so that short files are left for the end.
LONG = ["test_budgets.py", "test_contract.py", "test_faults.py", "test_cli.py", "test_checkpoint.py",
        "test_display.py", "test_long_runs.py"]


def rank(item):
    "The place of an item's file: the long ones, then notebooks, then the other tests."
    name = item.path.name
    return LONG.index(name) if name in LONG else len(LONG) + (not name.endswith(".ipynb"))


def pytest_collection_modifyitems(config, items):
    items.sort(key=rank)
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
    """A process of 150 MB, with all kernels, to every plan.

    A real one grows a little between asking for the least budget and spending it.
    """
    monkeypatch.setattr(plan, "resident_bytes", lambda: 150_000_000)
    monkeypatch.setattr(plan, "compiles_here", lambda apart: False)


@pytest.fixture
def all_threads(monkeypatch):
    "Work is spread over all threads, however little it is."
    monkeypatch.setattr(parallel, "MIN_PARALLEL_MACS", 0)
