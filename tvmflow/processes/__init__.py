"""Processes of this project: how they are started, supervised and ended."""
