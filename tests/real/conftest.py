import gc

import pytest


@pytest.fixture(autouse=True)
def freed():
    """A trainer of an earlier test holds up to 5 GB until its cycles of references are collected."""
    gc.collect()
    yield
    gc.collect()
