"""The steps of a release, one file each: each a Prefect task with a typed result."""
