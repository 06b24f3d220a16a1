"""Triggers: the runs that aliases in MLflow ask for, and the receiver of MLflow's webhooks."""

from tvmflow.triggers.catalogue import Alias, Catalogue, ManagedModel, RunRequest, load

__all__ = ["Alias", "Catalogue", "ManagedModel", "RunRequest", "load"]
