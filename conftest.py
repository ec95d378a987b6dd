"""What every test here goes by: no test fails because the machine is busy.

Hypothesis would fail an example that takes 200 ms, and a test whose examples are slow to make. Neither says anything of
what is tested on a machine that does other things at the same time; pytest-timeout ends what hangs.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
