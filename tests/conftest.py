"""For all tests: no property fails by the clock, since a busy machine proves nothing."""

import hypothesis

hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")
