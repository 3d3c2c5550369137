"""What every test runs under."""

from hypothesis import HealthCheck, settings

# The machines are shared: how long an example takes says nothing about the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")
