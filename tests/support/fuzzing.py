"""Settings of property tests: few examples, the same in every run, or many new ones with `--long`."""

from hypothesis import HealthCheck, settings

from support import scale


def examples(normal: int, long: int) -> settings:
    """The settings for a number of examples by the scale of the run.

    A normal run draws the same examples every time. With `--long` they are new; a failure prints the decorator
    `@reproduce_failure(...)` that draws the failing one again.
    """
    return settings(
        max_examples=scale.count(normal, long),
        derandomize=not scale.is_long(),
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
