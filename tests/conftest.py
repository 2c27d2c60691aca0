"Property tests are the same on every run and every machine: a failure seen once is seen again, and none comes by chance."
from hypothesis import settings

settings.register_profile("book", derandomize=True, deadline=None)
settings.load_profile("book")
