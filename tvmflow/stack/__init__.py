"""The local stack: Prefect, MLflow, S3, webhook receiver and worker on this machine's loopback address."""
