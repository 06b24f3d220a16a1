"""What several test files share: servers, models, waits, proxies, machines, the real steps, and the scale of a run.

Every module stands alone, so that a test imports no more than it needs: `from support.waits import wait_until`.
"""
