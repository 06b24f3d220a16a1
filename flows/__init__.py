"""What runs, and in which order: one file per deployment, each a Prefect flow."""
