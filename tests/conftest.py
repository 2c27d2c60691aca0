"What all tests share: property tests that are the same on every run and every machine, plans that a test before cannot move, small work spread."
import pytest
from hypothesis import settings

from k3lib import memory, parallel

# a failure seen once is seen again, and none comes by chance
settings.register_profile("book", derandomize=True, deadline=None)
settings.load_profile("book")


@pytest.fixture
def steady(monkeypatch):
    "A process of 150 MB to every plan: a real one grows a little between asking for the least budget and spending it."
    monkeypatch.setattr(memory, "resident_bytes", lambda: 150_000_000)


@pytest.fixture
def all_threads(monkeypatch):
    "Work is spread over all threads, however little it is."
    monkeypatch.setattr(parallel, "MIN_PARALLEL_MACS", 0)
