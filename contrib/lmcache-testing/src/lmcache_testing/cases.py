"""How Hypothesis draws the kit's cases: the same ones in each run, as fast as the machine is, one fault at a time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def drawn(cases: int, *, steps: int = 1, shortest: bool = True) -> settings:
    """`steps`: of one case of a machine. `shortest`: look for the shortest case that fails, which may take minutes."""
    return settings(
        max_examples=cases,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=tuple(Phase) if shortest else (Phase.generate,),
    )
