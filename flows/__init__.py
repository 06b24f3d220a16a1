"""Prefect flows, and what they share: the steps that run, their order and their place."""
