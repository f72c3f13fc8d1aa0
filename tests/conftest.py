"""What holds for every test: none asserts on a clock, so examples of Hypothesis have no deadline."""

from hypothesis import settings

settings.register_profile("headway", deadline=None, print_blob=True)
settings.load_profile("headway")
