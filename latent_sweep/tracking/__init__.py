"""Experiment tracking: what MLflow holds of a sweep, how it is uploaded and how it is verified."""
