"""The hardware: processors to build for, and what this machine has."""
