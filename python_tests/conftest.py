from hypothesis import HealthCheck, settings

# A busy machine may take any time for one example; the examples are the same in every run.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")
